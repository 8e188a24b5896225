"""Triton kernels of `kernels.moe`: four launches and a sum, none of which the host has to wait for.

    route      a program per token: softmax, its experts, and its place among the tokens of each of them
    plan       sorts the (token, expert) pairs by expert and cuts each expert's pairs into tiles
    gate_up    a tile of pairs by a block of columns: both halves of the product and the gated activation
    down       the same for the second product, scaled by the router's value
    sum        over the experts of each token, in fp32

Grids depend on the number of tokens alone: there are programs for the most tiles that may be needed, and those past the
number in the plan return at once. So a graph may capture the lot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.activation_triton import activate

BLOCK_PAIRS = 64  # of one program of the plan
TILE_FIELDS = 3  # expert, first sorted pair, end of the expert's sorted pairs


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of the blocks of one product."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def sparse_mlp(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_chosen: int,
    normalise: bool,
    activation: str,
    counts: Tensor,
) -> Tensor:
    """What `kernels.moe.route` and `kernels.moe.compute_experts` compute, from the router's logits on.

    Args:
        x: [num_tokens, hidden] bf16, fp16 or fp32 cuda.
        logits: [num_tokens, num_experts] fp32.
        gate_up, down: see `compute_experts`; contiguous.
        counts: [num_experts] i32 scratch, zeros before the first call; left as zeros. One stream at a time.
    """
    num_tokens, hidden = x.shape
    num_experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    if num_tokens == 0:
        return torch.empty_like(x)
    num_pairs = num_tokens * num_chosen
    values = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=x.device)
    ids, ranks = (torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=x.device) for _ in range(2))
    block_experts = triton.next_power_of_2(num_experts)
    _route_kernel[(num_tokens,)](
        logits.contiguous(), values, ids, ranks, counts, num_experts, NUM_CHOSEN=num_chosen,
        BLOCK_CHOSEN=triton.next_power_of_2(num_chosen), BLOCK_EXPERTS=block_experts, NORMALISE=normalise, num_warps=1,
    )  # fmt: skip
    shape = _choose_shape(num_pairs, num_experts, x.dtype)
    max_tiles = min(num_pairs, num_experts + num_pairs // shape.rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty(max_tiles * TILE_FIELDS + 1, dtype=torch.int32, device=x.device)  # the number of tiles is last
    _plan_kernel[(triton.cdiv(num_pairs, BLOCK_PAIRS),)](
        ids, ranks, counts, pairs, tiles, num_pairs, num_experts, max_tiles,
        BLOCK_EXPERTS=block_experts, BLOCK_PAIRS=BLOCK_PAIRS, BLOCK_ROWS=shape.rows, FIELDS=TILE_FIELDS, num_warps=4,
    )  # fmt: skip
    options = {
        "NUM_CHOSEN": num_chosen, "FIELDS": TILE_FIELDS, "BLOCK_ROWS": shape.rows, "BLOCK_DEPTH": shape.depth,
        "num_warps": shape.num_warps, "num_stages": shape.num_stages,
    }  # fmt: skip
    inner = x.new_empty(num_pairs, width)
    num_blocks = triton.cdiv(width, shape.columns)
    _gate_up_kernel[(max_tiles * num_blocks,)](
        x.contiguous(), gate_up, inner, pairs, tiles, counts, hidden, width, num_experts, max_tiles, num_blocks,
        BLOCK_COLUMNS=shape.columns, BLOCK_EXPERTS=block_experts, IS_SILU=activation == "silu", **options,
    )  # fmt: skip
    outs = x.new_empty(num_pairs, hidden)
    num_blocks = triton.cdiv(hidden, 2 * shape.columns)
    _down_kernel[(max_tiles * num_blocks,)](
        inner, down, outs, values, pairs, tiles, width, hidden, max_tiles, num_blocks,
        BLOCK_COLUMNS=2 * shape.columns, **options,
    )  # fmt: skip
    return outs.view(num_tokens, num_chosen, hidden).sum(1)


def _choose_shape(num_pairs: int, num_experts: int, dtype: torch.dtype) -> _Shape:
    """Tiles of the usual number of rows per expert and half as much again: a second tile reads the weights again."""
    rows = min(128, max(16, triton.next_power_of_2(num_pairs * 3 // (2 * num_experts))))
    if dtype == torch.float32:
        return _Shape(min(rows, 32), 32, 32, 4, 2)
    if rows <= 32:
        return _Shape(rows, 64, 128, 4, 3)
    return _Shape(rows, 64, 64, 4 if rows == 64 else 8, 3)


@triton.jit
def _route_kernel(
    logits_ptr, values_ptr, ids_ptr, ranks_ptr, counts_ptr, num_experts, NUM_CHOSEN: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_CHOSEN)
    inside = experts < num_experts
    logits = tl.load(logits_ptr + token * num_experts + experts, mask=inside, other=float("-inf"))
    weights = tl.exp(logits - tl.max(logits, axis=0))
    left = tl.where(inside, weights / tl.sum(weights, axis=0), -1.0)
    values = tl.zeros([BLOCK_CHOSEN], tl.float32)
    ids = tl.zeros([BLOCK_CHOSEN], tl.int32)
    for i in range(NUM_CHOSEN):
        best = tl.argmax(left, axis=0)
        values = tl.where(slots == i, tl.max(left, axis=0), values)
        # A row of NaN has no largest value, but its experts must exist.
        ids = tl.where(slots == i, tl.minimum(best, num_experts - 1).to(tl.int32), ids)
        left = tl.where(experts == best, -2.0, left)
    is_chosen = slots < NUM_CHOSEN
    if NORMALISE:
        values = values / tl.sum(values, axis=0)
    ranks = tl.atomic_add(counts_ptr + ids, 1, mask=is_chosen)
    tl.store(values_ptr + token * NUM_CHOSEN + slots, values, mask=is_chosen)
    tl.store(ids_ptr + token * NUM_CHOSEN + slots, ids, mask=is_chosen)
    tl.store(ranks_ptr + token * NUM_CHOSEN + slots, ranks, mask=is_chosen)


@triton.jit
def _plan_kernel(
    ids_ptr, ranks_ptr, counts_ptr, pairs_ptr, tiles_ptr, num_pairs, num_experts, max_tiles,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    pairs = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    inside = pairs < num_pairs
    ids = tl.load(ids_ptr + pairs, mask=inside, other=0)
    ranks = tl.load(ranks_ptr + pairs, mask=inside, other=0)
    before = tl.sum(tl.where(experts[None, :] < ids[:, None], counts[None, :], 0), axis=1)
    tl.store(pairs_ptr + before + ranks, pairs, mask=inside)
    if tl.program_id(0) == 0:
        ends = tl.cumsum(counts, axis=0)
        num_tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
        first_tile = tl.cumsum(num_tiles, axis=0) - num_tiles
        for i in range(tl.max(num_tiles, axis=0)):
            entry = tiles_ptr + (first_tile + i) * FIELDS
            is_there = i < num_tiles
            tl.store(entry, experts, mask=is_there)
            tl.store(entry + 1, ends - counts + i * BLOCK_ROWS, mask=is_there)
            tl.store(entry + 2, ends, mask=is_there)
        tl.store(tiles_ptr + max_tiles * FIELDS, tl.sum(num_tiles, axis=0))


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, inner_ptr, pairs_ptr, tiles_ptr, counts_ptr, hidden, width, num_experts, max_tiles, num_blocks,
    NUM_CHOSEN: tl.constexpr, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, IS_SILU: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    if tl.program_id(0) == 0:  # the plan has read them
        experts = tl.arange(0, BLOCK_EXPERTS)
        tl.store(counts_ptr + experts, tl.zeros([BLOCK_EXPERTS], tl.int32), mask=experts < num_experts)
    if tile >= tl.load(tiles_ptr + max_tiles * FIELDS):
        return
    expert = tl.load(tiles_ptr + tile * FIELDS).to(tl.int64)
    rows = tl.load(tiles_ptr + tile * FIELDS + 1) + tl.arange(0, BLOCK_ROWS)
    is_row = rows < tl.load(tiles_ptr + tile * FIELDS + 2)
    tokens = (tl.load(pairs_ptr + rows, mask=is_row, other=0) // NUM_CHOSEN).to(tl.int64)
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < width
    depths = tl.arange(0, BLOCK_DEPTH)
    x_ptrs = x_ptr + tokens[:, None] * hidden + depths[None, :]
    gate_ptrs = weight_ptr + (expert * 2 * width + columns[None, :]) * hidden + depths[:, None]
    up_ptrs = gate_ptrs + width.to(tl.int64) * hidden
    gate = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, hidden, BLOCK_DEPTH):
        is_depth = start + depths < hidden
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        is_weight = is_depth[:, None] & is_column[None, :]
        gate = tl.dot(x, tl.load(gate_ptrs + start, mask=is_weight, other=0.0), gate, input_precision="ieee")
        up = tl.dot(x, tl.load(up_ptrs + start, mask=is_weight, other=0.0), up, input_precision="ieee")
    dtype = inner_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = activate(gate, IS_SILU).to(dtype).to(tl.float32)
    out = (activated * up.to(dtype).to(tl.float32)).to(dtype)
    out_ptrs = inner_ptr + rows[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(out_ptrs, out, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _down_kernel(
    inner_ptr, weight_ptr, outs_ptr, values_ptr, pairs_ptr, tiles_ptr, width, hidden, max_tiles, num_blocks,
    NUM_CHOSEN: tl.constexpr, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    if tile >= tl.load(tiles_ptr + max_tiles * FIELDS):
        return
    expert = tl.load(tiles_ptr + tile * FIELDS).to(tl.int64)
    rows = tl.load(tiles_ptr + tile * FIELDS + 1) + tl.arange(0, BLOCK_ROWS)
    is_row = rows < tl.load(tiles_ptr + tile * FIELDS + 2)
    pairs = tl.load(pairs_ptr + rows, mask=is_row, other=0)
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < hidden
    depths = tl.arange(0, BLOCK_DEPTH)
    inner_ptrs = inner_ptr + rows[:, None].to(tl.int64) * width + depths[None, :]
    weight_ptrs = weight_ptr + (expert * hidden + columns[None, :]) * width + depths[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, width, BLOCK_DEPTH):
        is_depth = start + depths < width
        inner = tl.load(inner_ptrs + start, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_depth[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(inner, weight, total, input_precision="ieee")
    total = total * tl.load(values_ptr + pairs, mask=is_row, other=0.0)[:, None]
    out_ptrs = outs_ptr + pairs[:, None].to(tl.int64) * hidden + columns[None, :]
    tl.store(out_ptrs, total.to(outs_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
