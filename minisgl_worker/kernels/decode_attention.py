"""Attention of one new token per row over its paged KV cache."""

import torch
from torch import Tensor


def decode_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    slots: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Plain torch twin of `DecodeAttention`: row by row, fp32 (fp64 for fp64 inputs) throughout.

    Args:
        query: [num_rows, num_heads, head_dim].
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        page_table: [num_table_rows, max_pages] i32; row i of the batch uses table row i, or slots[i].
        seq_lens: [num_table_rows] i32, tokens in the cache, the current one included; indexed as page_table.
        scale: factor of the logits, usually head_dim ** -0.5.
        slots: [num_rows] i32 or i64.
        window: number of latest tokens that a row sees; None = all.
    Returns:
        [num_rows, num_heads, head_dim], query's dtype; zeros for a row of length 0.
    """
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(query)
    for row in range(num_rows):
        table_row = row if slots is None else int(slots[row])
        length = int(seq_lens[table_row])
        first = 0 if window is None else max(0, length - window)
        if length <= first:
            continue
        tokens = torch.arange(first, length, device=query.device)
        pages = page_table[table_row, tokens // page_size].to(torch.int64)
        key = k_cache[pages, tokens % page_size].to(wide)
        value = v_cache[pages, tokens % page_size].to(wide)
        grouped = query[row].to(wide).view(num_kv_heads, num_heads // num_kv_heads, head_dim)
        weights = torch.einsum("kgd,tkd->kgt", grouped * scale, key).softmax(dim=-1)
        out[row] = torch.einsum("kgt,tkd->kgd", weights, value).reshape(num_heads, head_dim).to(query.dtype)
    return out
