"""The attention backends, by name. Each needs something that may not be there, so it is imported when it is chosen."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch

Make = Callable[[ModelConfig, int, int, int, torch.device], AttentionBackend]


def make_backend(
    pair: tuple[str, str], model: ModelConfig, num_heads: int, num_kv_heads: int, max_rows: int, device: torch.device
) -> tuple[str, AttentionBackend]:
    """The (name, backend) for a (prefill, decode) pair of names; "auto" is the measured best for the device.

    Args:
        num_heads, num_kv_heads: of this rank.
        max_rows: decode rows of one batch.

    Raises:
        ModelLoadError: a backend is unknown or lacks something; the text names it.
    """
    best = "triton" if device.type == "cuda" else "torch"
    prefill, decode = (best if name == "auto" else name for name in pair)
    made: dict[str, AttentionBackend] = {}
    for name in {prefill, decode}:
        if name not in BACKENDS:
            raise ModelLoadError(f"attention backend {name!r} is not built in; there are {', '.join(BACKENDS)}")
        made[name] = BACKENDS[name](model, num_heads, num_kv_heads, max_rows, device)
    if prefill == decode:
        return prefill, made[prefill]
    return f"{prefill},{decode}", PairedAttention(made[prefill], made[decode])


class PairedAttention:
    """One backend for the prefill rows, another for the decode rows."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self._prefill, self._decode = prefill, decode

    def plan(self, batch: ForwardBatch) -> None:
        for backend, part, _ in self._split(batch):
            backend.plan(part)

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        parts = [backend.attend(query[rows], layer, part) for backend, part, rows in self._split(batch)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _split(self, batch: ForwardBatch) -> list[tuple[AttentionBackend, ForwardBatch, slice]]:
        parts = []
        if batch.num_decode:
            parts.append((self._decode, batch.decode_part(), slice(batch.num_decode)))
        if batch.prefills:
            parts.append((self._prefill, batch.prefill_part(), slice(batch.num_decode, None)))
        return parts


def _make_torch(
    model: ModelConfig, num_heads: int, num_kv_heads: int, max_rows: int, device: torch.device
) -> AttentionBackend:
    from minisgl_worker.attention.torch_ref import TorchAttention

    return TorchAttention(model)


def _make_triton(
    model: ModelConfig, num_heads: int, num_kv_heads: int, max_rows: int, device: torch.device
) -> AttentionBackend:
    if device.type != "cuda":
        raise ModelLoadError(f"attention backend triton needs an NVIDIA GPU, the device is {device}")
    from minisgl_worker.attention.triton import TritonAttention

    return TritonAttention(model, num_heads, num_kv_heads, max_rows, device)


BACKENDS: Mapping[str, Make] = MappingProxyType({"torch": _make_torch, "triton": _make_triton})
