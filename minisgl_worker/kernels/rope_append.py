"""The step between the qkv projection and attention: head norms, rotary embedding, and writing K and V to the cache."""

import torch
from torch import Tensor

from minisgl_worker.kernels.dispatch import compute_dtype, use_triton
from minisgl_worker.kernels.native import VECTOR, kernels_for
from minisgl_worker.kernels.norm import rms_norm_reference


def qk_norm_rope_append(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_locations: Tensor,
) -> Tensor:
    """Norm (optional) and rotate q and k, write k and v to the paged cache, return the rotated q.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v.
        q_weight, k_weight: [head_dim] weights of the per-head RMS norms, qkv's dtype or fp32; None = there are none.
        eps: of the per-head norms.
        cos_sin: [max_positions, head_dim] fp32 (fp64 for fp64 models): cosines, then sines, of head_dim / 2 angles.
            Value i is rotated with value i + head_dim / 2.
        positions: [num_tokens] i64.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim], head_dim contiguous; written in place.
        kv_locations: [num_tokens] i64, page * page_size + offset in the page, no two alike except in a dummy page.
    Returns:
        query [num_tokens, num_heads, head_dim], qkv's dtype.
    """
    arguments = (qkv, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, kv_locations)
    if use_triton(qkv):
        from minisgl_worker.kernels import rope_append_triton  # Triton is absent where there is no GPU

        return rope_append_triton.qk_norm_rope_append(*arguments)
    is_one_dtype = all(weight is None or weight.dtype == qkv.dtype for weight in (q_weight, k_weight))
    if is_one_dtype and k_cache.shape[-1] % (2 * VECTOR) == 0 and (native := kernels_for(qkv)) is not None:
        return native.qk_norm_rope_append(*arguments)
    return qk_norm_rope_append_reference(*arguments)


def qk_norm_rope_append_reference(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_locations: Tensor,
) -> Tensor:
    """`qk_norm_rope_append` in plain torch."""
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        query = rms_norm_reference(query, q_weight, eps)
    if k_weight is not None:
        key = rms_norm_reference(key, k_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    pages, offsets = kv_locations // page_size, kv_locations % page_size
    k_cache[pages, offsets] = key
    v_cache[pages, offsets] = value
    return query


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [num_tokens, heads, head_dim] by cos, sin [num_tokens, 1, half]."""
    low, high = x.to(compute_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
