"""The `fi` and `fa` backends: FlashInfer's paged attention, by its fa2 kernels or by its fa3 kernels for SM90.

FlashInfer plans on the host, for each step, from the lengths and page tables that the worker keeps there. An eager step
is one call for all its rows, a decode row being a prompt of one token. A graph reads its plan from memory at fixed
addresses; `plan_replay` writes it anew before every replay, since a plan of other lengths gives wrong results.

What a plan consists of reaches the device by copies from pinned memory in the order of the stream, so that one place on
the device serves all steps; on the host, memory that a copy may still read is not touched (`_PlanMemory`).
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan
from flashinfer.jit import gen_batch_prefill_module
from numpy.typing import NDArray
from torch import Tensor

from minisgl_worker.attention.base import AttentionSetup, ForwardBatch, HostRows
from minisgl_worker.attention.jit import build_announced
from minisgl_worker.attention.page_lists import (
    PageLists,
    join,
    list_decode_pages,
    list_prefill_pages,
    pack_lists,
    query_indptr,
    split_workspace_bytes,
)
from minisgl_worker.kernels.launch import num_multiprocessors

PLAN_BYTES = 8 * 2**20  # what FlashInfer's own wrappers take for a plan
NUM_PLANS = 8  # on the host: more than steps in flight, so that a free one is there without waiting
BUILD_SECONDS = {"fa2": 25, "fa3": 85}  # with 16 cores


class FlashInferAttention:
    """Attention of prefill and decode rows by one family of kernels ("fa2" or "fa3"), eager or inside graphs."""

    def __init__(self, setup: AttentionSetup, kernels: str):
        self._setup, self._kernels = setup, kernels
        build_kernels(setup, kernels)
        device, page_size = setup.device, setup.page_size
        num_bytes = split_workspace_bytes(setup, num_multiprocessors(device))
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._memory = {window: _PlanMemory(device) for window in setup.windows}
        self._eager = {
            window: BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernels)
            for window in setup.windows
        }
        most_pages = setup.max_rows * -(-setup.max_seq_len // page_size)
        self._header = PageLists.header_size(setup.max_rows)
        self._lists = torch.zeros(self._header + most_pages, dtype=torch.int32, device=device)
        self._replayed: dict[tuple[int, int | None], BatchDecodeWithPagedKVCacheWrapper] = {}
        # The planned wrapper for each window of the model.
        self._current: dict[int | None, BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper] = {}

    def plan(self, batch: ForwardBatch) -> None:
        if batch.host is None and batch.num_decode:
            return  # inside a graph: plan_replay came before
        setup = self._setup
        lists = list_prefill_pages(batch.prefills, setup.page_size)
        if batch.num_decode:
            assert batch.host is not None
            lists = join(list_decode_pages(batch.host, setup.page_size), lists)
        starts = query_indptr(batch.num_decode, batch.prefills)
        longest = int(np.diff(starts).max())
        arguments = [self._on_host(array) for array in (starts, lists.indptr, lists.indices, lists.last_page_len)]
        for window, wrapper in self._eager.items():
            self._memory[window].plan(
                wrapper,
                lambda wrapper=wrapper, window=window: wrapper.plan(
                    *arguments, setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.page_size,
                    causal=True, sm_scale=setup.scale, window_left=_window_left(window),
                    q_data_type=setup.dtype, max_token_per_sequence=longest,
                ),
            )  # fmt: skip
        self._current.update(self._eager)

    def plan_replay(self, rows: HostRows) -> None:
        setup, num_rows = self._setup, len(rows.slots)
        lists = list_decode_pages(rows, setup.page_size)
        packed = pack_lists(lists, setup.max_rows)
        self._lists[: len(packed)].copy_(self._on_host(packed), non_blocking=True)
        indptr, last_page_len = torch.from_numpy(lists.indptr), torch.from_numpy(lists.last_page_len)
        indices = self._lists[self._header : len(packed)]
        for window, memory in self._memory.items():
            wrapper, plan = self._replayed.get((num_rows, window)), fast_decode_plan
            if wrapper is None:  # its first plan also loads the kernels
                wrapper = self._replayed[num_rows, window] = self._make_replayed(num_rows)
                plan = BatchDecodeWithPagedKVCacheWrapper.plan
            memory.plan(
                wrapper,
                lambda wrapper=wrapper, window=window, plan=plan: plan(
                    wrapper, indptr, indices, last_page_len,
                    setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.page_size,
                    window_left=_window_left(window), q_data_type=setup.dtype, kv_data_type=setup.dtype,
                    sm_scale=setup.scale,
                ),
            )  # fmt: skip
            self._current[window] = wrapper

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        wrapper = self._current[self._setup.layer_windows[layer]]
        return wrapper.run(query, batch.kv.layer(layer), out=torch.empty_like(query))

    def _on_host(self, array: NDArray[np.int32]) -> Tensor:
        """A tensor that the device can copy while the host goes on."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._setup.device.type == "cuda" else tensor

    def _make_replayed(self, num_rows: int) -> BatchDecodeWithPagedKVCacheWrapper:
        """A wrapper for graphs of `num_rows` rows. All of them read their lists in the same place."""
        last_page_len = self._lists[PageLists.last_page_len_at(self._setup.max_rows) :]
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=self._lists[: num_rows + 1],
            paged_kv_indices_buffer=self._lists[self._header :],
            paged_kv_last_page_len_buffer=last_page_len[:num_rows],
            backend=self._kernels,
        )  # fmt: skip


class _PlanMemory:
    """Where the plans for one window lie: one place on the device, several on the host, used in turn."""

    def __init__(self, device: torch.device):
        self._on_device = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=device)
        self._on_host: deque[_HostPlan] = deque(_HostPlan(device.type == "cuda") for _ in range(NUM_PLANS))

    def plan(
        self,
        wrapper: BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper,
        plan: Callable[[], None],
    ) -> None:
        """Have `plan` make the wrapper's plan here. The device may still be copying an earlier one from the host."""
        host = self._on_host[0]
        self._on_host.rotate(-1)
        if host.is_free is not None:
            host.is_free.synchronize()
        for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            assert hasattr(wrapper, name), f"this version of FlashInfer has no {name}: plans would overwrite each other"
        wrapper._int_workspace_buffer = self._on_device
        wrapper._pin_memory_int_workspace_buffer = host.memory
        plan()
        if host.is_free is not None:
            host.is_free.record()


class _HostPlan:
    """Pinned memory for one plan, and the event after which it may be written again. Without a GPU, plain memory."""

    def __init__(self, is_cuda: bool) -> None:
        self.memory = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        self.is_free = torch.cuda.Event() if is_cuda else None


def build_kernels(setup: AttentionSetup, kernels: str) -> None:
    """Compile what is not there yet, one kind of kernel for full attention and one for windows."""
    for has_window in sorted({window is not None for window in setup.windows}):
        spec = gen_batch_prefill_module(
            kernels, setup.dtype, setup.dtype, setup.dtype, torch.int32, setup.head_dim, setup.head_dim,
            0, has_window, False, False,
        )  # fmt: skip
        build_announced(spec, BUILD_SECONDS[kernels])


def _window_left(window: int | None) -> int:
    """FlashInfer counts the tokens before the current one."""
    return -1 if window is None else window - 1
