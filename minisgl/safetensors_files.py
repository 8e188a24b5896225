"""Which safetensors files make up a checkpoint, and where in them each tensor lies. Only headers are read.

Nothing in a file is trusted: its header is checked against its size before anything else uses it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 100 * 2**20
MAX_DIMENSIONS = 8
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. Its values are contiguous, the last dimension innermost."""

    file: Path
    dtype: str  # as the file has it; a key of DTYPE_BYTES for a tensor that a model can use
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file
    num_bytes: int


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the checkpoint: those that the index lists, or else those of the folder.

    Raises:
        ModelLoadError: there is none, one that the index lists is missing, or there are only pickle files.
    """
    present = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX_NAME).is_file():
        files = sorted({folder / name for name in _read_index(folder).values()})
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelLoadError(f"{folder / INDEX_NAME} lists files that do not exist: {', '.join(missing[:5])}")
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]  # others beside it hold the same tensors in another layout
    else:
        files = present
    if not files:
        raise _no_weights(folder)
    return tuple(files)


def read_tensors(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Every tensor that the checkpoint's files hold, by its name there; of those in several files, the index decides.

    Raises:
        ModelLoadError: a file is not safetensors, is shorter or longer than its header says, or has tensors that
            overlap; or the index names a tensor that is not in its file, or two files hold the same tensor without one.
    """
    found: dict[str, StoredTensor] = {}
    folder = files[0].parent
    index = _read_index(folder) if (folder / INDEX_NAME).is_file() else {}
    for file in files:
        for name, tensor in read_header(file).items():
            if index.get(name, file.name) != file.name:
                continue
            if name in found:
                raise ModelLoadError(f"{file} and {found[name].file} both hold {name}, and no index says which counts")
            found[name] = tensor
    if missing := [name for name in index if name not in found]:
        raise ModelLoadError(
            f"{folder / INDEX_NAME} lists {len(missing)} tensors that are not in their files: "
            + ", ".join(f"{name} ({index[name]})" for name in missing[:5])
        )
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; errors as `read_tensors`."""
    if not file.is_file():  # a pipe would be waited for
        raise ModelLoadError(f"{file} is not a file")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise ModelLoadError(f"{file} is not a whole safetensors file ({size} bytes)")
            header = json.loads(stream.read(header_bytes))
        start = 8 + header_bytes
        tensors = {name: _place(file, entry, start) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{file} has no valid safetensors header: {error}") from None
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].num_bytes)):
        if tensor.offset_bytes != end:
            raise ModelLoadError(f"{file}: tensor {name} begins at byte {tensor.offset_bytes}, expected {end}")
        end += tensor.num_bytes
    if size != end:
        raise ModelLoadError(f"{file} has {size} bytes, but its header says {end}; it was cut off or added to")
    return tensors


def _place(file: Path, entry: Mapping[str, Any], start: int) -> StoredTensor:
    """A checked entry of a header; ValueError and its like where it is not one."""
    dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, first, end)
    if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers) or end < first:
        raise ValueError(f"a tensor of shape {shape!r:.100} at bytes {first!r:.30} to {end!r:.30}")
    if not isinstance(dtype, str) or (dtype in DTYPE_BYTES and prod(shape) * DTYPE_BYTES[dtype] != end - first):
        raise ValueError(f"a tensor of {dtype!r:.30} and shape {shape!r:.100} in {end - first} bytes")
    return StoredTensor(file, dtype, shape, start + first, end - first)


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor names and the names of their files."""
    index = JsonFile(folder / INDEX_NAME)
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.fail("weight_map", weight_map, "an object of tensor names and file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise index.fail(f"weight_map.{tensor}", name, "the name of a .safetensors file in the same folder")
    return weight_map


def _no_weights(folder: Path) -> ModelLoadError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if not pickles:
        return ModelLoadError(f"{folder} has no weights: no .safetensors file")
    return ModelLoadError(
        f"{folder} has no .safetensors file, only {', '.join(pickles[:3])}, which could run code when loaded and is "
        "never read; convert it where you trust it: transformers' AutoModelForCausalLM.from_pretrained(folder)"
        ".save_pretrained(new_folder) writes safetensors"
    )
