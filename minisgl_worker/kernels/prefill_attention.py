"""Attention of the new tokens of prompts over the paged KV cache, cached prefixes included."""

import torch
from torch import Tensor


def prefill_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_ids: Tensor,
    first_position: int,
    scale: float,
    *,
    window: int | None = None,
) -> Tensor:
    """Plain torch twin of `prefill_attention_triton.prefill_attention`, for one prompt, fp32 (fp64 for fp64 inputs).

    Args:
        query: [num_tokens, num_heads, head_dim], consecutive tokens whose K and V are in the cache.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
        page_ids: [n] pages of positions 0, page_size, ...
        first_position: position of the first query token.
        scale: factor of the logits, usually head_dim ** -0.5.
        window: number of latest tokens, its own included, that a token sees; None = all.
    Returns:
        [num_tokens, num_heads, head_dim], query's dtype.
    """
    num_tokens, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    tokens = torch.arange(first_position + num_tokens, device=query.device)
    pages = page_ids.to(torch.int64)[tokens // page_size]
    key, value = k_cache[pages, tokens % page_size].to(wide), v_cache[pages, tokens % page_size].to(wide)
    grouped = query.to(wide).view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    logits = torch.einsum("qkgd,tkd->kgqt", grouped * scale, key)
    distance = tokens[first_position:, None] - tokens[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgqt,tkd->qkgd", weights, value).reshape(query.shape).to(query.dtype)
