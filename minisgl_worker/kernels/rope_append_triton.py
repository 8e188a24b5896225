"""Triton kernel of `kernels.rope_append`: one program per token and block of heads of one kind (q, k or v)."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl

HEADS_PER_PROGRAM = 8


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
    """See `kernels.rope_append.qk_norm_rope_append`."""
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "k and v cache need one layout"
    q_blocks, kv_blocks = triton.cdiv(num_heads, HEADS_PER_PROGRAM), triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    pdl = use_pdl(qkv, num_tokens * (q_blocks + 2 * kv_blocks))
    if num_tokens:
        _qk_norm_rope_append_kernel[(num_tokens, q_blocks + 2 * kv_blocks)](
            qkv, q_weight, k_weight, cos_sin, positions, kv_locations, query, k_cache, v_cache,
            qkv.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2), PAGE_SIZE=page_size,
            Q_BLOCKS=q_blocks, KV_BLOCKS=kv_blocks, BLOCK=HEADS_PER_PROGRAM,
            HAS_Q_NORM=q_weight is not None, HAS_K_NORM=k_weight is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return query


@triton.jit
def _norm_rope(low, high, weight_ptr, cos, sin, lanes, inside, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm and rotate heads given by their two halves [heads, half]; returns the halves, rounded as the plain twin."""
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low_wide * low_wide + high_wide * high_wide, axis=1) / (2 * HALF)
        scale = tl.rsqrt(squares + eps)[:, None]
        low_weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0)
        high_weight = tl.load(weight_ptr + HALF + lanes, mask=inside, other=0.0)
        low_wide = (low_wide * scale).to(low_weight.dtype).to(tl.float32) * low_weight.to(tl.float32)[None, :]
        high_wide = (high_wide * scale).to(high_weight.dtype).to(tl.float32) * high_weight.to(tl.float32)[None, :]
        low_wide = low_wide.to(low.dtype).to(tl.float32)
        high_wide = high_wide.to(low.dtype).to(tl.float32)
    rotated_low = low_wide * cos[None, :] - high_wide * sin[None, :]
    rotated_high = high_wide * cos[None, :] + low_wide * sin[None, :]
    return rotated_low.to(low.dtype), rotated_high.to(low.dtype)


@triton.jit
def _qk_norm_rope_append_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, locations_ptr, query_ptr, k_cache_ptr, v_cache_ptr,
    token_stride, page_stride, slot_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, Q_BLOCKS: tl.constexpr, KV_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, HALF_BLOCK)
    lane_inside = lanes < HALF
    if PDL:
        # In this order: the next kernel may then count on all that came before this one (see `launch.use_pdl`).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position, location = tl.load(positions_ptr + token), tl.load(locations_ptr + token)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + lanes, mask=lane_inside, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + lanes, mask=lane_inside, other=0.0)
    is_query = part < Q_BLOCKS
    block = tl.where(is_query, part, (part - Q_BLOCKS) % KV_BLOCKS)
    heads = block * BLOCK + tl.arange(0, BLOCK)
    inside = (heads < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS))[:, None] & lane_inside[None, :]
    is_key = part < Q_BLOCKS + KV_BLOCKS
    first_head = tl.where(is_query, 0, tl.where(is_key, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS))
    source = qkv_ptr + token * token_stride + (first_head + heads)[:, None] * (2 * HALF) + lanes[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    cache_row = location // PAGE_SIZE * page_stride + location % PAGE_SIZE * slot_stride
    cache_offsets = cache_row + (heads * head_stride)[:, None] + lanes[None, :]
    if is_query:
        low, high = _norm_rope(low, high, q_weight_ptr, cos, sin, lanes, lane_inside, eps, HALF, HAS_Q_NORM)
        target = query_ptr + (token * NUM_HEADS + heads[:, None]) * (2 * HALF) + lanes[None, :]
        tl.store(target, low, mask=inside)
        tl.store(target + HALF, high, mask=inside)
    elif is_key:
        low, high = _norm_rope(low, high, k_weight_ptr, cos, sin, lanes, lane_inside, eps, HALF, HAS_K_NORM)
        tl.store(k_cache_ptr + cache_offsets, low, mask=inside)
        tl.store(k_cache_ptr + cache_offsets + HALF, high, mask=inside)
    else:
        tl.store(v_cache_ptr + cache_offsets, low, mask=inside)
        tl.store(v_cache_ptr + cache_offsets + HALF, high, mask=inside)
