"""The `torch` backend: plain batched attention, the oracle for every other backend and the one that a CPU runs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_worker.attention.base import AttentionSetup, ForwardBatch, HostRows, PrefillRow
from minisgl_worker.kernels.native import kernels_for


class TorchAttention:
    """Gathers each row's pages and attends with torch's own kernel. No loop over tokens, nor over decode rows."""

    def __init__(self, setup: AttentionSetup):
        self._windows = setup.layer_windows
        self._scale = setup.scale

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing to prepare."""

    def plan_replay(self, rows: HostRows) -> None:
        """Nothing to prepare."""

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = batch.kv.layer(layer)
        window = self._windows[layer]
        parts = []
        if batch.num_decode:
            parts.append(self._decode(query[: batch.num_decode], k_cache, v_cache, batch, window))
        for row in batch.prefills:
            rows = slice(row.first_row, row.first_row + row.num_tokens)
            parts.append(self._prefill(query[rows], k_cache, v_cache, row, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, window: int | None
    ) -> Tensor:
        """query [rows, heads, dim] over the pages of each row."""
        native = kernels_for(query)
        if native is None:
            return attend_decode_reference(query, k_cache, v_cache, batch, self._scale, window)
        table, seq_lens, slots = batch.decode_page_table, batch.decode_seq_lens, batch.decode_slots
        return native.attend_decode(query, k_cache, v_cache, table, seq_lens, slots, self._scale, window)

    def _prefill(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, row: PrefillRow, window: int | None) -> Tensor:
        """query [tokens, heads, dim], the tokens of one request from first_position on, over its pages up to them."""
        end = row.first_position + row.num_tokens
        pages = row.page_ids.to(query.device)
        key = k_cache.index_select(0, pages).flatten(0, 1)[:end].transpose(0, 1)
        value = v_cache.index_select(0, pages).flatten(0, 1)[:end].transpose(0, 1)
        mask = None
        if row.first_position or window is not None:
            positions = torch.arange(end, device=query.device)
            distance = positions[row.first_position :, None] - positions
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[None], value[None], mask,
            is_causal=mask is None, scale=self._scale, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)


def attend_decode_reference(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, scale: float, window: int | None
) -> Tensor:
    """The decode rows in plain torch, all at once, padded to the longest; arguments as `attend` has them."""
    rows, table, seq_lens = query.shape[0], batch.decode_page_table, batch.decode_seq_lens
    if batch.decode_slots is not None:
        table, seq_lens = table[batch.decode_slots], seq_lens[batch.decode_slots]
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    length = table.shape[1] * page_size
    positions = torch.arange(length, device=query.device)
    visible = positions < seq_lens[:, None]
    if window is not None:
        visible &= positions >= seq_lens[:, None] - window
    flat, shape = table.flatten(), (rows, length, num_kv_heads * head_dim)
    key, value = (_clear(cache.index_select(0, flat).view(shape), visible) for cache in (k_cache, v_cache))
    key, value = (x.view(rows, length, num_kv_heads, head_dim).transpose(1, 2) for x in (key, value))
    out = F.scaled_dot_product_attention(
        query.view(rows, -1, 1, head_dim), key, value, visible[:, None, None, :], scale=scale, enable_gqa=True
    )
    return out.view(rows, -1, head_dim)


def _clear(x: Tensor, visible: Tensor) -> Tensor:
    """x [rows, length, size], in place, with zeros where visible [rows, length] is not.

    Memory that nobody wrote may hold NaN, and 0 * NaN is NaN: hidden values must be replaced, not weighted 0. As
    integers they may be multiplied, which is vectorised, unlike filling by a mask.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    x.view(integers).mul_(visible[:, :, None].to(integers))
    return x
