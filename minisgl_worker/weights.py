"""Streams a checkpoint's tensors, one at a time, straight into their fused and sharded places.

A model says what it wants (`WeightSource`); a missing, extra or misshapen tensor is a `ModelLoadError` that names it.
Only a rank's own slices are read from safetensors. Nothing is ever unpickled.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufHeader, GgufTensor
from minisgl.model_folder import ModelConfig, ModelFolder
from minisgl_worker.layers import WeightSource

DUMMY_STD = 0.02  # never zeros: they run faster than real weights and hide wrong indexing

# Names of GGUF files, piece by piece, for the names that transformers uses.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Tensors that a checkpoint may hold though the model does not want them.
GGUF_EXTRAS = ("rope_freqs.weight",)
PERMUTED_GGUF_ARCHITECTURES = ("LlamaForCausalLM",)


def load_weights(sources: Iterable[WeightSource], folder: ModelFolder) -> None:
    """Fill every target from the checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, not wanted, or has another shape; the text names up to five and the file.
    """
    wanted: dict[str, list[WeightSource]] = defaultdict(list)
    for source in sources:
        wanted[source.name].append(source)
    found = _load_gguf(wanted, folder) if folder.is_gguf else _load_safetensors(wanted, folder)
    if missing := [name for name in wanted if name not in found]:
        raise ModelLoadError(f"{folder.path} lacks {len(missing)} tensors: {', '.join(missing[:5])}")


def fill_dummy_weights(sources: Iterable[WeightSource]) -> None:
    """Random weights, the same ones for every number of ranks: normal with standard deviation 0.02, norms around 1."""
    for source in sources:
        device = source.target.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(source.name.encode()))
        values = torch.empty(source.full_shape, dtype=source.target.dtype, device=device)
        values.normal_(0.0, DUMMY_STD, generator=generator)
        if source.name.endswith("norm.weight"):
            values += 1.0
        _store(source, values)


def _load_safetensors(wanted: dict[str, list[WeightSource]], folder: ModelFolder) -> set[str]:
    found: set[str] = set()
    extra: list[str] = []
    for file in folder.weight_files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118, not a dict
                    if name not in wanted:
                        extra += [] if _may_be_left(name, folder.config) else [name]
                        continue
                    found.add(name)
                    view = tensors.get_slice(name)
                    for source in wanted[name]:
                        _check_shape(source, tuple(view.get_shape()), file)
                        _store(source, view)
        except SafetensorError as error:
            raise ModelLoadError(f"{file}: {error}") from None
    _refuse_extra(extra, folder.path)
    return found


def _load_gguf(wanted: dict[str, list[WeightSource]], folder: ModelFolder) -> set[str]:
    # Deferred: only GGUF files need it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    header = GgufHeader(folder.path)
    names = {gguf_name(name): name for name in wanted}
    _refuse_extra([t for t in header.tensors if t not in names and t not in GGUF_EXTRAS], folder.path)
    data = np.memmap(folder.path, dtype=np.uint8, mode="r")
    for entry in header.tensors.values():
        if entry.name not in names:
            continue
        raw = data[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]
        values = dequantize(raw.reshape(_raw_rows(entry)), GGMLQuantizationType(entry.ggml_type))
        tensor = torch.from_numpy(np.require(values, requirements=("C", "W")).reshape(entry.shape))
        for source in wanted[names[entry.name]]:
            _check_shape(source, entry.shape, folder.path)
            _store(source, _restore_rotary_order(tensor, source.name, folder.config))
    return {names[name] for name in header.tensors if name in names}


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor that transformers calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def _raw_rows(entry: GgufTensor) -> tuple[int, ...]:
    """Shape of the tensor's bytes, one row for each row of elements."""
    rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
    return rows, entry.num_bytes // rows


def _restore_rotary_order(tensor: Tensor, name: str, config: ModelConfig) -> Tensor:
    """Undo the reordering of q and k rows: GGUF's Llama rotates neighbours, we rotate value i with value i + half."""
    if config.architecture not in PERMUTED_GGUF_ARCHITECTURES or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _check_shape(source: WeightSource, shape: Sequence[int], file: Path) -> None:
    if tuple(shape) != source.full_shape:
        raise ModelLoadError(f"{file}: {source.name} has the shape {tuple(shape)}, expected {source.full_shape}")


def _store(source: WeightSource, values: Tensor) -> None:
    """Copy the source's slice of `values` (a tensor, or a safetensors slice, which then reads no more than that)."""
    start = source.start
    stop = source.full_shape[source.dim] if source.length is None else start + source.length
    if start < stop:
        source.target.copy_(values[start:stop] if source.dim == 0 else values[:, start:stop])


def _may_be_left(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold `name` without the model wanting it: a tied head, or a buffer that is computed."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _refuse_extra(names: list[str], path: Path) -> None:
    if names:
        raise ModelLoadError(
            f"{path} holds {len(names)} tensors that the model has no place for: {', '.join(names[:5])}"
        )
