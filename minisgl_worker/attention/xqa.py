"""The decode rows of the `trtllm` backend: XQA, TensorRT-LLM's kernel, as FlashInfer ships it for SM90.

It reads lengths and page tables on the device and needs no plan, so that a graph may capture it. It splits a row's KV
only while batch * num_kv_heads is less than the number of multiprocessors.
"""

import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from flashinfer.jit.xqa import gen_xqa_module
from torch import Tensor

from minisgl_worker.attention.base import AttentionSetup, ForwardBatch, HostRows
from minisgl_worker.attention.jit import build_announced

WORKSPACE_BYTES = 128 * 2**20  # the first 8 MiB are counters, which have to be zero at first
BUILD_SECONDS = 10  # with 16 cores


class XqaDecode:
    """Attention of decode rows alone. One table row per batch row: those of a graph are gathered once per step."""

    def __init__(self, setup: AttentionSetup):
        self._setup = setup
        group = setup.num_heads // setup.num_kv_heads
        spec = gen_xqa_module(setup.dtype, setup.dtype, setup.page_size, setup.head_dim, group, False, setup.dtype, 1)
        build_announced(spec, BUILD_SECONDS)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
        max_pages = -(-setup.max_seq_len // setup.page_size)
        self._gathered_table = torch.zeros(setup.max_rows, max_pages, dtype=torch.int32, device=setup.device)
        self._gathered_lens = torch.zeros(setup.max_rows, dtype=torch.int32, device=setup.device)
        self._table, self._seq_lens = self._gathered_table, self._gathered_lens

    def plan(self, batch: ForwardBatch) -> None:
        num_rows, slots = batch.num_decode, batch.decode_slots
        self._table, self._seq_lens = batch.decode_page_table, batch.decode_seq_lens
        if slots is not None:
            self._table, self._seq_lens = self._gathered_table[:num_rows], self._gathered_lens[:num_rows]
            torch.index_select(batch.decode_page_table, 0, slots, out=self._table)
            torch.index_select(batch.decode_seq_lens, 0, slots, out=self._seq_lens)

    def plan_replay(self, rows: HostRows) -> None:
        """Nothing to prepare: the graph gathers what it reads."""

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        # Without programmatic dependent launch: the kernel lets its successor start before it has waited itself, which
        # `launch.use_pdl` does not allow.
        return xqa_batch_decode_with_kv_cache(
            query, batch.kv.layer(layer), self._workspace, self._table, self._seq_lens, self._setup.max_seq_len,
            bmm1_scale=self._setup.scale, out=torch.empty_like(query), enable_pdl=False,
        )  # fmt: skip
