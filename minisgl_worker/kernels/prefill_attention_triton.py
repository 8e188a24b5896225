"""Triton kernel of prefill attention: one program per tile of query tokens and head, over all prompts of a step."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl

TILE_QUERIES = 64
TILE_KEYS = 64


def plan_prefill(rows: Sequence[tuple[int, int, int]], tile_queries: int = TILE_QUERIES) -> Tensor:
    """The work list of a step, to be copied to the device: [num_tiles, 4] i32 on the CPU.

    Args:
        rows: per prompt (first token in the step's query, number of tokens, position of the first token).
    Returns:
        Per tile: row, first token in the query, number of tokens, position of its first token; most keys first.
    """
    tiles = [
        (row, start + done, min(tile_queries, num_tokens - done), position + done)
        for row, (start, num_tokens, position) in enumerate(rows)
        for done in range(0, num_tokens, tile_queries)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    return torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, 4)


def prefill_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    tile_queries: int = TILE_QUERIES,
) -> None:
    """Attention of every prompt's new tokens, whose K and V are in the cache already; causal.

    Args:
        query: [num_tokens, num_heads, head_dim].
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim], head_dim contiguous.
        page_table: [num_rows, max_pages] i32.
        tiles: [num_tiles, 4] i32, `plan_prefill`'s list on the device.
        scale: factor of the logits.
        out: as query; only the tokens that tiles name are written.
        window: number of latest tokens, its own included, that a token sees; None = all.
    """
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "k and v cache need one layout"
    assert query.is_contiguous() and out.is_contiguous() and page_table.stride(1) == 1
    pdl = use_pdl(query, tiles.shape[0] * num_heads)
    if tiles.shape[0]:
        _prefill_kernel[(tiles.shape[0], num_heads)](
            query, k_cache, v_cache, page_table, tiles, out, scale * 1.4426950408889634,
            page_table.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim), PAGE_SIZE=page_size, WINDOW=window or 0,
            TILE_QUERIES=tile_queries, TILE_KEYS=TILE_KEYS, PDL=pdl,
            num_warps=8 if tile_queries >= 128 else 4, num_stages=3, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _prefill_kernel(
    query_ptr, k_ptr, v_ptr, page_table_ptr, tiles_ptr, out_ptr, scale, table_stride, page_stride, slot_stride,
    head_stride, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        # In this order: the next kernel may then count on all that came before this one (see `launch.use_pdl`).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, first_token = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    num_tokens, position = tl.load(tiles_ptr + tile * 4 + 2), tl.load(tiles_ptr + tile * 4 + 3)
    lanes = tl.arange(0, DIM_BLOCK)
    queries = tl.arange(0, TILE_QUERIES)
    lane_inside = lanes < HEAD_DIM
    query_inside = (queries < num_tokens)[:, None] & lane_inside[None, :]
    query_rows = (first_token + queries).to(tl.int64) * NUM_HEADS + head
    query_offsets = query_rows[:, None] * HEAD_DIM + lanes[None, :]
    q = tl.load(query_ptr + query_offsets, mask=query_inside, other=0.0)
    table = page_table_ptr + row.to(tl.int64) * table_stride
    k_head_ptr = k_ptr + head // GROUP * head_stride
    v_head_ptr = v_ptr + head // GROUP * head_stride
    top = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    values = tl.zeros([TILE_QUERIES, DIM_BLOCK], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
    stop = position + num_tokens
    for start in range(begin, stop, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        inside = keys < stop
        pages = tl.load(table + keys // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = pages * page_stride + (keys % PAGE_SIZE) * slot_stride
        load_mask = inside[:, None] & lane_inside[None, :]
        k = tl.load(k_head_ptr + offsets[:, None] + lanes[None, :], mask=load_mask, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        distance = (position + queries)[:, None] - keys[None, :]
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        # A token may see no key of a tile: the maximum is then -inf, and -inf minus itself is NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(v_head_ptr + offsets[:, None] + lanes[None, :], mask=load_mask, other=0.0)
        values = values * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + query_offsets, values.to(out_ptr.dtype.element_ty), mask=query_inside)
