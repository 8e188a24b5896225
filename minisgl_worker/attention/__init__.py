"""The attention backends, by name. Each needs something that may not be there, so it is imported when it is chosen."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl.requirements import ATTENTION
from minisgl_worker.attention.base import AttentionBackend, AttentionSetup, ForwardBatch, HostRows
from minisgl_worker.kernels.dispatch import TRITON_DTYPES


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
            raise ModelLoadError(f"attention_backend {name!r} is not built in; there are {', '.join(BACKENDS)}")
        _check(name, setup)
        try:
            made[name] = BACKENDS[name](setup)
        except ImportError as error:
            raise ModelLoadError(
                f"attention_backend {name} needs a package that cannot be imported ({error}); "
                "mend its installation, or use attention_backend=auto"
            ) from error
    if prefill == decode:
        return prefill, made[prefill]
    return f"{prefill},{decode}", PairedAttention(made[prefill], made[decode])


def _check(name: str, setup: AttentionSetup) -> None:
    """What `check_options` has checked, and the rest now that the device is known."""
    requirements = ATTENTION[name]
    requirements.check(
        "attention_backend", name, device=setup.device.type, dtype=str(setup.dtype).removeprefix("torch."),
        head_dim=setup.head_dim, page_size=setup.page_size, windows=setup.windows,
    )  # fmt: skip
    if requirements.capability is not None:
        requirements.check_capability(name, torch.cuda.get_device_capability(setup.device))


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


BACKENDS: Mapping[str, Callable[[AttentionSetup], AttentionBackend]] = MappingProxyType(
    {"torch": _make_torch, "triton": _make_triton, "fi": _make_fi, "fa": _make_fa, "trtllm": _make_trtllm}
)
