"""The `triton` backend: own kernels for prefill and decode. Decode needs no plan on the host; a graph may capture it."""

import numpy as np
import torch
from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import ForwardBatch
from minisgl_worker.kernels.decode_attention_triton import DecodePlan, decode_attention
from minisgl_worker.kernels.prefill_attention_triton import plan_prefill, prefill_attention


class TritonAttention:
    """One decode plan for each window size of the model."""

    def __init__(self, config: ModelConfig, num_heads: int, num_kv_heads: int, max_rows: int, device: torch.device):
        self._windows = config.layer_windows
        self._scale = config.head_dim**-0.5
        self._plans = {
            window: DecodePlan(max_rows, num_heads, num_kv_heads, config.head_dim, device, window)
            for window in set(config.layer_windows)
        }
        self._device = device
        self._tiles: Tensor | None = None
        self._prefill_table: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None:
        if batch.num_decode:
            for plan in self._plans.values():
                plan.build(batch.decode_seq_lens, batch.num_decode, batch.decode_slots)
        if batch.prefills:
            rows = [(row.first_row, row.num_tokens, row.first_position) for row in batch.prefills]
            self._tiles = plan_prefill(rows).pin_memory().to(self._device, non_blocking=True)
            table = np.zeros((len(batch.prefills), max(len(row.page_ids) for row in batch.prefills)), np.int32)
            for i, row in enumerate(batch.prefills):
                table[i, : len(row.page_ids)] = row.page_ids
            self._prefill_table = torch.from_numpy(table).pin_memory().to(self._device, non_blocking=True)

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = batch.kv.layer(layer)
        window = self._windows[layer]
        decoded = None
        if batch.num_decode:
            decoded = decode_attention(
                query[: batch.num_decode], k_cache, v_cache, batch.decode_page_table, batch.decode_seq_lens,
                self._scale, self._plans[window], batch.decode_slots,
            )  # fmt: skip
        if not batch.prefills:
            assert decoded is not None, "an empty batch has no attention"
            return decoded
        assert self._tiles is not None and self._prefill_table is not None, "plan() was not called for this batch"
        out = torch.empty_like(query)
        if decoded is not None:
            out[: batch.num_decode] = decoded
        prefill_attention(query, k_cache, v_cache, self._prefill_table, self._tiles, self._scale, out, window)
        return out
