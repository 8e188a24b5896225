"""The attention backends, by name. Each needs something that may not be there, so it is imported when it is chosen."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl_worker.attention.base import AttentionBackend, AttentionSetup, ForwardBatch, HostRows
from minisgl_worker.attention.requirements import Requirements
from minisgl_worker.kernels.dispatch import TRITON_DTYPES


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A row of the table of backends."""

    requirements: Requirements
    make: Callable[[AttentionSetup], AttentionBackend]


def make_backend(pair: tuple[str, str], setup: AttentionSetup) -> tuple[str, AttentionBackend]:
    """The (name, backend) for a (prefill, decode) pair of names.

    Raises:
        ModelLoadError: a backend is unknown or lacks something; the text names it.
    """
    best = choose_auto(setup)
    prefill, decode = (best if name == "auto" else name for name in pair)
    made: dict[str, AttentionBackend] = {}
    for name in dict.fromkeys((prefill, decode)):
        if name not in BACKENDS:
            raise ModelLoadError(f"attention backend {name!r} is not built in; there are {', '.join(BACKENDS)}")
        entry = BACKENDS[name]
        entry.requirements.check(name, setup)
        try:
            made[name] = entry.make(setup)
        except ImportError as error:
            raise entry.requirements.explain_missing(name, error) from error
    if prefill == decode:
        return prefill, made[prefill]
    return f"{prefill},{decode}", PairedAttention(made[prefill], made[decode])


def choose_auto(setup: AttentionSetup) -> str:
    """What "auto" means: the measured best where it can run, for prefill and decode rows alike."""
    return "triton" if setup.device.type == "cuda" and setup.dtype in TRITON_DTYPES else "torch"


class PairedAttention:
    """One backend for the prefill rows, another for the decode rows."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend):
        self._prefill, self._decode = prefill, decode

    def plan(self, batch: ForwardBatch) -> None:
        for backend, part, _ in self._split(batch):
            backend.plan(part)

    def plan_replay(self, rows: HostRows) -> None:
        self._decode.plan_replay(rows)

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


def _make_torch(setup: AttentionSetup) -> AttentionBackend:
    from minisgl_worker.attention.torch_ref import TorchAttention

    return TorchAttention(setup)


def _make_triton(setup: AttentionSetup) -> AttentionBackend:
    from minisgl_worker.attention.triton import TritonAttention

    return TritonAttention(setup)


def _make_fi(setup: AttentionSetup) -> AttentionBackend:
    from minisgl_worker.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(setup, "fa2")


def _make_fa(setup: AttentionSetup) -> AttentionBackend:
    from minisgl_worker.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(setup, "fa3")


def _make_trtllm(setup: AttentionSetup) -> AttentionBackend:
    from minisgl_worker.attention.flashinfer import FlashInferAttention
    from minisgl_worker.attention.xqa import XqaDecode

    return PairedAttention(FlashInferAttention(setup, "fa2"), XqaDecode(setup))


_HALF = (torch.bfloat16, torch.float16)
BACKENDS: Mapping[str, BackendEntry] = MappingProxyType(
    {
        "torch": BackendEntry(Requirements(), _make_torch),
        "triton": BackendEntry(Requirements(needs_gpu=True, package="triton", dtypes=TRITON_DTYPES), _make_triton),
        "fi": BackendEntry(
            Requirements(needs_gpu=True, package="flashinfer-python", dtypes=_HALF, head_dims=(64, 128, 256)), _make_fi
        ),
        "fa": BackendEntry(
            Requirements(
                needs_gpu=True, package="flashinfer-python", capability=9, dtypes=_HALF, head_dims=(64, 128, 256),
                has_windows=False,
            ),
            _make_fa,
        ),
        "trtllm": BackendEntry(
            Requirements(
                needs_gpu=True, package="flashinfer-python", capability=9, dtypes=_HALF, head_dims=(64, 128, 256),
                page_sizes=(16, 32, 64, 128), has_windows=False,
            ),
            _make_trtllm,
        ),
    }
)  # fmt: skip
