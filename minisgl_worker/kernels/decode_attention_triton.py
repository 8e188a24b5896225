"""Split-KV decode attention without a plan on the host.

The tokens of all rows, laid end to end in units of `UNIT_TOKENS`, are cut into `num_workers` equal ranges. A first
kernel (once per step) writes where each range begins; it needs nothing but the lengths on the device, so a captured
graph serves any lengths. Each worker of the attention kernel then walks its range: the part of a row that it covers is
a segment. A row inside one worker is written at once; a row cut over several leaves one partial result per segment, and
the worker that finishes last combines them in order. All KV heads of a range run side by side, so that the lines of a
token are read together, and the grid depends on the device and the configuration only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import num_multiprocessors, use_pdl

UNIT_TOKENS = 32
COMBINE_PARTS = 16  # partial results whose loads are in flight together
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters of the attention kernel."""

    tile_tokens: int
    num_warps: int
    num_stages: int
    programs_per_sm: int  # as many as fit: one wave
    min_units: int = 2  # no worker takes fewer units: more workers on a row make more partial results


def choose_config(group: int) -> DecodeConfig:
    """Measured on H200 for groups of 2 and 5 query heads per KV head, 1 to 256 rows, 16 to 32k tokens a row."""
    return DecodeConfig(32, 2 if group <= 2 else 4, 4, 4)


class DecodePlan:
    """How one step's KV is cut over workers, and the memory in which workers hand over partial results.

    Made once per attention window; `build` fills it for each step (one kernel, capturable). For one stream at a time.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        window: int | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        self.config = config or choose_config(num_heads // num_kv_heads)
        self.window = window
        self.max_rows = max_rows
        num_programs = num_multiprocessors(device) * self.config.programs_per_sm
        self.num_workers = max(1, num_programs // num_kv_heads)
        shape = (self.num_workers, 2, num_heads)
        self.head = torch.zeros(2, dtype=torch.int32, device=device)  # units per worker, units of all rows
        self.row_ends = torch.zeros(max_rows, dtype=torch.int32, device=device)  # units of each row and all before it
        self.first_segments = torch.zeros(self.num_workers, 8, dtype=torch.int32, device=device)
        self.counters = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)  # zero between kernels
        self.part_values = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.part_stats = torch.empty(*shape, 2, dtype=torch.float32, device=device)  # maximum (log2), sum

    def build(self, seq_lens: Tensor, num_rows: int, slots: Tensor | None = None) -> None:
        """Cut the step's tokens over the workers; `seq_lens` and `slots` as in `decode_attention`."""
        assert num_rows <= self.max_rows, f"plan has room for {self.max_rows} rows, batch has {num_rows}"
        pdl = use_pdl(seq_lens)
        _plan_kernel[(self.num_workers,)](
            seq_lens, slots, self.head, self.row_ends, self.first_segments, num_rows, self.num_workers,
            WINDOW=self.window or 0, UNIT=UNIT_TOKENS, MIN_UNITS=self.config.min_units,
            BLOCK=max(16, triton.next_power_of_2(self.max_rows)), PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


def decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    plan: DecodePlan,
    out: Tensor,
    *,
    slots: Tensor | None = None,
    plan_is_old: bool = False,
) -> None:
    """Attention of one token per row, on the lengths that `plan.build` saw. Arguments as `decode_attention_reference`.

    Args:
        out: as query; written.
        plan_is_old: the lengths, tables and the plan are older than the kernel launched just before this one, and that
            kernel is `qk_norm_rope_append`, attention, or none of this package. They are then read while it still runs.
    """
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "k and v cache need one layout"
    assert query.is_contiguous() and out.is_contiguous() and page_table.stride(1) == 1, "rows must be contiguous"
    group = num_heads // num_kv_heads
    config, pdl = plan.config, use_pdl(query)
    if num_rows:
        _decode_kernel[(num_kv_heads, plan.num_workers)](
            query, k_cache, v_cache, page_table, seq_lens, slots, out,
            plan.head, plan.row_ends, plan.first_segments, plan.counters, plan.part_values, plan.part_stats,
            scale * LOG2_E, page_table.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
            HEAD_DIM=head_dim, DIM_BLOCK=triton.next_power_of_2(head_dim), PAGE_SIZE=page_size,
            WINDOW=plan.window or 0, TILE=config.tile_tokens, UNIT=UNIT_TOKENS,
            COMBINE_GROUP=triton.next_power_of_2(group), PARTS=COMBINE_PARTS, PDL=pdl, EARLY=plan_is_old,
            num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _first_token(length, WINDOW: tl.constexpr, UNIT: tl.constexpr):
    """First token that a row of `length` sees, rounded down to a unit."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // UNIT * UNIT
    return first


@triton.jit(do_not_specialize=["num_rows", "num_workers"])
def _plan_kernel(
    seq_lens_ptr, slots_ptr, head_ptr, row_ends_ptr, segments_ptr, num_rows, num_workers,
    WINDOW: tl.constexpr, UNIT: tl.constexpr, MIN_UNITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    inside = rows < num_rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    table_rows = rows
    if slots_ptr is not None:
        table_rows = tl.load(slots_ptr + rows, mask=inside, other=0).to(tl.int32)
    lengths = tl.load(seq_lens_ptr + table_rows, mask=inside, other=0)
    # A row of length 0 keeps one (empty) unit, so that a worker writes its zeros.
    units = tl.where(inside, tl.maximum(tl.cdiv(lengths - _first_token(lengths, WINDOW, UNIT), UNIT), 1), 0)
    ends = tl.cumsum(units, axis=0)
    total = tl.sum(units, axis=0)
    per_worker = tl.maximum(tl.cdiv(total, num_workers), MIN_UNITS)
    first_row = tl.sum(((ends <= worker * per_worker) & inside).to(tl.int32), axis=0)
    is_first = rows == first_row
    segment = segments_ptr + worker * 8
    tl.store(segment, first_row)
    tl.store(segment + 1, tl.sum(tl.where(is_first, table_rows, 0), axis=0))
    tl.store(segment + 2, tl.sum(tl.where(is_first, lengths, 0), axis=0))
    tl.store(segment + 3, tl.sum(tl.where(is_first, ends - units, 0), axis=0))
    tl.store(segment + 4, tl.sum(tl.where(is_first, ends, 0), axis=0))
    if worker == 0:
        tl.store(row_ends_ptr + rows, ends, mask=inside)
        tl.store(head_ptr, per_worker)
        tl.store(head_ptr + 1, total)


@triton.jit
def _page_ids(table_ptr, table_row, table_stride, tokens, stop, PAGE_SIZE: tl.constexpr):
    """Pages of a row's tokens; 0 for those from `stop` on."""
    return tl.load(table_ptr + table_row.to(tl.int64) * table_stride + tokens // PAGE_SIZE, mask=tokens < stop, other=0)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    query_ptr, k_ptr, v_ptr, page_table_ptr, seq_lens_ptr, slots_ptr, out_ptr,
    head_ptr, row_ends_ptr, segments_ptr, counters_ptr, part_values_ptr, part_stats_ptr,
    scale, table_stride, page_stride, token_stride, head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    COMBINE_GROUP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    lanes, members, tile = tl.arange(0, DIM_BLOCK), tl.arange(0, GROUP_BLOCK), tl.arange(0, TILE)
    inside = (members < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
    per_worker = tl.load(head_ptr)
    position = worker * per_worker
    end = tl.minimum(position + per_worker, tl.load(head_ptr + 1))
    segment = segments_ptr + worker * 8
    row, table_row, length = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    row_begin, row_end = tl.load(segment + 3), tl.load(segment + 4)
    begin = _first_token(length, WINDOW, UNIT) + (position - row_begin) * UNIT
    pages = _page_ids(page_table_ptr, table_row, table_stride, begin + tile, length, PAGE_SIZE)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    while position < end:
        # The next row of this worker, if any, asked for now and needed at the end.
        has_next = row_end < end
        next_row_end = tl.load(row_ends_ptr + row + 1, mask=has_next, other=0)
        next_table_row = row + 1
        if slots_ptr is not None:
            next_table_row = tl.load(slots_ptr + row + 1, mask=has_next, other=0).to(tl.int32)
        next_length = tl.load(seq_lens_ptr + next_table_row, mask=has_next, other=0)
        q_rows = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + members
        q = tl.load(query_ptr + q_rows[:, None] * HEAD_DIM + lanes[None, :], mask=inside, other=0.0)
        stop = tl.minimum(begin + (tl.minimum(end, row_end) - position) * UNIT, length)
        values, top, total = _attend_segment(
            q, k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, page_table_ptr, pages, begin, stop, length,
            table_row, scale, table_stride, page_stride, token_stride,
            GROUP_BLOCK, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, TILE,
        )  # fmt: skip
        begin = _first_token(next_length, WINDOW, UNIT)
        pages = _page_ids(page_table_ptr, next_table_row, table_stride, begin + tile, next_length, PAGE_SIZE)
        first_worker, last_worker = row_begin // per_worker, (row_end - 1) // per_worker
        if first_worker == last_worker:
            values = values / tl.where(total > 0, total, 1.0)[:, None]
            out_offsets = q_rows[:, None] * HEAD_DIM + lanes[None, :]
            tl.store(out_ptr + out_offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            part_rows = (_place(worker, first_worker, row_begin, per_worker) * NUM_KV_HEADS + kv_head) * GROUP + members
            tl.store(part_values_ptr + part_rows[:, None] * HEAD_DIM + lanes[None, :], values, mask=inside)
            tl.store(part_stats_ptr + part_rows * 2, top, mask=members < GROUP)
            tl.store(part_stats_ptr + part_rows * 2 + 1, total, mask=members < GROUP)
            # All threads' stores come before the counter's step, which publishes them.
            tl.debug_barrier()
            counter = counters_ptr + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_worker - first_worker:
                tl.store(counter, 0)
                _combine(
                    part_values_ptr, part_stats_ptr, out_ptr, row, kv_head, row_begin, per_worker, first_worker,
                    last_worker, NUM_KV_HEADS, GROUP, HEAD_DIM, DIM_BLOCK, COMBINE_GROUP, PARTS,
                )  # fmt: skip
        position, row_begin, row_end = row_end, row_end, next_row_end
        row, table_row, length = row + 1, next_table_row, next_length


@triton.jit
def _attend_segment(
    q, k_ptr, v_ptr, page_table_ptr, pages, begin, stop, length, table_row,
    scale, table_stride, page_stride, token_stride,
    GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One head group over the tokens begin..stop of a row: (weighted values, maximum logit, sum of weights)."""
    lanes = tl.arange(0, DIM_BLOCK)
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    values = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(begin, stop, TILE):
        tokens = start + tl.arange(0, TILE)
        # Page ids one tile ahead: the loads of K and V then wait for no other load.
        next_pages = _page_ids(page_table_ptr, table_row, table_stride, tokens + TILE, stop, PAGE_SIZE)
        offsets = pages.to(tl.int64) * page_stride + (tokens % PAGE_SIZE) * token_stride
        inside = (tokens < stop)[:, None] & (lanes < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets[:, None] + lanes[None, :], mask=inside, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = tokens < stop
        if WINDOW > 0:
            visible = visible & (tokens >= length - WINDOW)
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        base = new_top
        if WINDOW > 0:
            # Before the first visible token the maximum is -inf, and -inf minus itself is NaN.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + offsets[:, None] + lanes[None, :], mask=inside, other=0.0)
        values = values * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top, pages = new_top, next_pages
    return values, top, total


@triton.jit
def _place(worker, first_worker, row_begin, per_worker):
    """Where a worker leaves its part of a row: second, if the row opens inside the worker's range, else first."""
    return worker * 2 + ((worker == first_worker) & (row_begin > worker * per_worker)).to(tl.int32)


@triton.jit
def _combine(
    part_values_ptr, part_stats_ptr, out_ptr, row, kv_head, row_begin, per_worker, first_worker, last_worker,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    COMBINE_GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row and KV head, in the order of the workers."""
    members, lanes = tl.arange(0, COMBINE_GROUP), tl.arange(0, DIM_BLOCK)
    inside = (members < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    top = tl.full([COMBINE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([COMBINE_GROUP], tl.float32)
    values = tl.zeros([COMBINE_GROUP, DIM_BLOCK], tl.float32)
    for first in range(first_worker, last_worker + 1, PARTS):
        for i in tl.static_range(PARTS):
            worker = first + i
            is_part = members < tl.where(worker <= last_worker, GROUP, 0)
            part_rows = (_place(worker, first_worker, row_begin, per_worker) * NUM_KV_HEADS + kv_head) * GROUP + members
            # Other programs wrote these: read them where they are coherent, in L2.
            part_top = tl.load(part_stats_ptr + part_rows * 2, is_part, float("-inf"), cache_modifier=".cg")
            part_total = tl.load(part_stats_ptr + part_rows * 2 + 1, is_part, 0.0, cache_modifier=".cg")
            offsets = part_rows[:, None] * HEAD_DIM + lanes[None, :]
            part = tl.load(part_values_ptr + offsets, inside & is_part[:, None], 0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay, weight = tl.exp2(top - base), tl.exp2(part_top - base)
            total = total * decay + part_total * weight
            values = values * decay[:, None] + part * weight[:, None]
            top = new_top
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + members
    out_offsets = out_rows[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(out_ptr + out_offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
