"""The `triton` backend: own kernels for prefill and decode. Decode plans on the device: a graph may capture it."""

import numpy as np
import torch
from torch import Tensor

from minisgl_worker.attention.base import AttentionSetup, ForwardBatch, HostRows
from minisgl_worker.kernels.decode_attention_triton import DecodePlan, decode_attention
from minisgl_worker.kernels.prefill_attention_triton import plan_prefill, prefill_attention


class TritonAttention:
    """Decode rows by split-KV attention, with one plan for each window size of the model; prefill rows by tiles."""

    def __init__(self, setup: AttentionSetup):
        self._windows = setup.layer_windows
        self._scale = setup.scale
        self._device = setup.device
        self._plans = {
            window: DecodePlan(
                setup.max_rows, setup.num_heads, setup.num_kv_heads, setup.head_dim, setup.device, window
            )
            for window in setup.windows
        }
        self._tiles: Tensor | None = None  # [num_tiles, 4] i32
        self._prefill_table: Tensor | None = None  # [num_prefill_rows, max_pages] i32

    def plan(self, batch: ForwardBatch) -> None:
        if batch.num_decode:
            for plan in self._plans.values():
                plan.build(batch.decode_seq_lens, batch.num_decode, batch.decode_slots)
        if batch.prefills:
            rows = [(row.first_row, row.num_tokens, row.first_position) for row in batch.prefills]
            table = np.zeros((len(batch.prefills), max(len(row.page_ids) for row in batch.prefills)), np.int32)
            for i, row in enumerate(batch.prefills):
                table[i, : len(row.page_ids)] = row.page_ids
            self._tiles = self._to_device(plan_prefill(rows))
            self._prefill_table = self._to_device(torch.from_numpy(table))

    def plan_replay(self, rows: HostRows) -> None:
        """Nothing to prepare: the graph plans on the device."""

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = batch.kv.layer(layer)
        window = self._windows[layer]
        out = torch.empty_like(query)
        if batch.num_decode:
            decode_attention(
                query[: batch.num_decode], k_cache, v_cache, batch.decode_page_table, batch.decode_seq_lens,
                self._scale, self._plans[window], out[: batch.num_decode], slots=batch.decode_slots,
                plan_is_old=layer > 0,
            )  # fmt: skip
        if batch.prefills:
            assert self._tiles is not None and self._prefill_table is not None, "plan() was not called for this batch"
            prefill_attention(query, k_cache, v_cache, self._prefill_table, self._tiles, self._scale, out, window)
        return out

    def _to_device(self, host: Tensor) -> Tensor:
        """A copy on the device; the host does not wait for it."""
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)
