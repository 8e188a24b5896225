"""Decode steps as one graph replay each: embedding to sampled token, with the slots' state read and left on the device.

There is one graph for each bucket of batch sizes; a smaller batch is padded with rows of the dummy slot. What the host
knows of a step (its slots and page grants) is one small copy; nothing waits for the device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl_worker.attention.base import AttentionBackend, ForwardBatch, HostRows
from minisgl_worker.batch import SlotState
from minisgl_worker.kernels.sampling import Draw, sample
from minisgl_worker.kernels.step import DIFF_HEADER, DeviceSlots, StepInputs, begin_step, diff_size, finish_step
from minisgl_worker.kv_cache import KVCache

NUM_STAGING = 8  # host buffers for diffs: more than steps in flight, so a free one is there without waiting


def choose_buckets(max_running_req: int, sizes: Sequence[int] | None, max_size: int | None) -> list[int]:
    """Batch sizes to capture, ascending; empty for none.

    By default 1, 2, 4, then steps of 8 up to 64 and of 16 beyond, up to 256: padding is then at most 7 rows, or 6%.
    """
    if sizes is None:
        top = min(max_running_req, 256 if max_size is None else max_size)
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), 256]
        sizes = [size for size in sizes if size < top] + ([top] if top else [])
    elif max_size is not None:
        sizes = [size for size in sizes if size <= max_size]
    return sorted({min(size, max_running_req) for size in sizes})


@dataclass(slots=True)
class _Staging:
    """A pinned host buffer for one step's diff, and the event after which it may be written again."""

    host: Tensor  # [diff_size] i32
    view: NDArray[np.int32]
    is_free: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Graph:
    """One bucket. Without a GPU `replay` is the step itself, so that it can be tested."""

    inputs: StepInputs
    logits: Tensor  # [num_rows, vocab]
    tokens: Tensor  # [num_rows] i64
    out: Tensor  # [num_rows] i32, see `finish_step`
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs decode-only steps of up to `max_rows` rows.

    Args:
        forward: (token ids, batch) -> logits, the model.
        draw: `sample`, or what does the same for a vocabulary that is shared among ranks.
    """

    def __init__(
        self,
        buckets: list[int],
        slots: SlotState,
        kv: KVCache,
        backend: AttentionBackend,
        forward: Callable[[Tensor, ForwardBatch], Tensor],
        draw: Callable[[Tensor, Tensor, Tensor, Tensor], Draw] = sample,
    ):
        self._slots, self._kv, self._backend, self._forward, self._draw = slots, kv, backend, forward, draw
        device = slots.last_token.device
        self._buckets = buckets
        self.max_rows = buckets[-1]
        page_table = torch.zeros(slots.page_table.shape, dtype=torch.int32, device=device)
        page_table[-1] = kv.dummy_page
        slots.page_table[-1] = kv.dummy_page
        seq_lens = torch.ones(len(slots.seq_lens), dtype=torch.int32, device=device)
        self._state = DeviceSlots(slots.last_token, seq_lens, page_table, slots.temperature, slots.seeds)
        self._diff = torch.zeros(diff_size(self.max_rows), dtype=torch.int32, device=device)
        self._diff[DIFF_HEADER:] = slots.num_slots
        self._staging: deque[_Staging] = deque()
        self._graphs: dict[int, _Graph] = {}

    def capture(self) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory."""
        is_cuda = self._diff.is_cuda
        for _ in range(NUM_STAGING):
            host = torch.zeros(self._diff.shape, dtype=torch.int32, pin_memory=is_cuda)
            self._staging.append(_Staging(host, host.numpy(), torch.cuda.Event() if is_cuda else None))  # type: ignore[arg-type]
        pool = torch.cuda.graph_pool_handle() if is_cuda else None
        for size in reversed(self._buckets):
            self._graphs[size] = self._capture_one(size, pool) if is_cuda else self._plain(size)

    def run(self, page_grants: NDArray[np.int32]) -> "_Graph":
        """Launch the step of the slots' decode set; returns its graph, whose tensors hold the outcome until the next.

        Args:
            page_grants: [n, 3] i32 slot, index, page; the slots' host state has them already.
        """
        rows = self._slots.decode_slots
        bucket = next(size for size in self._buckets if size >= len(rows))
        staging = self._staging[0]
        self._staging.rotate(-1)
        if staging.is_free is not None:
            staging.is_free.synchronize()
        view = staging.view
        view[0] = len(page_grants)
        view[DIFF_HEADER : DIFF_HEADER + len(rows)] = rows
        view[DIFF_HEADER + len(rows) : DIFF_HEADER + bucket] = self._slots.num_slots
        first_grant = DIFF_HEADER + self.max_rows
        view[first_grant : first_grant + page_grants.size] = page_grants.ravel()
        self._diff.copy_(staging.host, non_blocking=True)
        if staging.is_free is not None:
            staging.is_free.record()
        self._plan_replay(view[DIFF_HEADER : DIFF_HEADER + bucket])
        graph = self._graphs[bucket]
        graph.replay()
        return graph

    def sync_slots(self, slots: NDArray[np.int64]) -> None:
        """Bring the device's copy of lengths, and of the named slots' pages, to the host's state."""
        device = self._diff.device
        lengths = self._slots.seq_lens.astype(np.int32)
        lengths[-1] = 1
        self._state.seq_lens.copy_(_pinned(lengths, device), non_blocking=True)
        if len(slots):
            rows = _pinned(slots, device).to(device, non_blocking=True)
            tables = _pinned(self._slots.page_table[slots], device).to(device, non_blocking=True)
            self._state.page_table.index_copy_(0, rows, tables)

    def _capture_one(self, size: int, pool: object) -> _Graph:
        """One bucket's graph. A run before it lets libraries and Triton do what they do only once."""
        static: dict[str, Tensor] = {}
        inputs = StepInputs.empty(size, self._diff.device)
        out = torch.zeros(size, dtype=torch.int32, device=self._diff.device)

        def step() -> None:
            static["logits"], static["tokens"] = self._step(inputs, out)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._plan_replay(np.full(size, self._slots.num_slots))
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are captured: NCCL has one of its own, which watches over the collectives.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return _Graph(inputs, static["logits"], static["tokens"], out, graph.replay)

    def _plain(self, size: int) -> _Graph:
        """The step without a graph: the twin that tests run on a CPU."""
        inputs = StepInputs.empty(size, self._diff.device)
        out = torch.zeros(size, dtype=torch.int32)
        self._plan_replay(np.full(size, self._slots.num_slots))
        logits, tokens = self._step(inputs, out)

        def replay() -> None:
            new_logits, new_tokens = self._step(inputs, out)
            logits.copy_(new_logits)
            tokens.copy_(new_tokens)

        return _Graph(inputs, logits, tokens, out, replay)

    def _plan_replay(self, rows: NDArray[np.integer]) -> None:
        """Let the backend do its host's part for the step of these slots, whose next token is not counted in yet."""
        slots = rows.astype(np.int64)
        self._backend.plan_replay(HostRows(self._slots.seq_lens[slots] + 1, self._slots.page_table, slots))

    def _step(self, inputs: StepInputs, out: Tensor) -> tuple[Tensor, Tensor]:
        """The whole step for the rows of `inputs`: (logits, tokens)."""
        begin_step(self._diff, self.max_rows, self._state, inputs, self._kv.page_size)
        batch = ForwardBatch(
            kv=self._kv,
            positions=inputs.positions,
            kv_locations=inputs.kv_locations,
            num_decode=len(inputs.tokens),
            decode_page_table=self._state.page_table,
            decode_seq_lens=self._state.seq_lens,
            decode_slots=inputs.slots,
            prefills=(),
            sampling_rows=None,
        )
        self._backend.plan(batch)
        logits = self._forward(inputs.tokens, batch)
        draw = self._draw(logits, inputs.temperature, inputs.seeds, inputs.next_positions)
        finish_step(inputs, self._state, draw.tokens, draw.failed, out)
        return logits, draw.tokens


def _pinned(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor
