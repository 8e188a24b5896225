"""Split-KV decode attention without a plan on the host.

The tokens of all rows, laid end to end in units of `UNIT_TOKENS`, are cut into `num_workers` equal ranges. A first kernel
(once per step) writes where each range begins; it needs nothing but the lengths on the device, so that a captured graph
serves any lengths. Each worker of the attention kernel then walks its range: the part of a row that it covers is a segment. A
row inside one worker is written at once; a row cut over several leaves one partial result per segment, and the worker that
finishes last combines them in order. All KV heads of a range run side by side, so that whole cache lines of a token are read
together, and the grid depends on the device and on the batch's bucket only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_worker.kernels.launch import num_multiprocessors, use_pdl



@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters of the attention kernel."""

    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    unit_tokens: int = 32
    tma: bool = False
    min_units: int = 4  # no worker takes fewer units: more workers on a row make more partial results


class DecodePlan:
    """How one step's KV is cut over workers, and the memory in which workers hand over partial results.

    Built once per batch bucket and attention window and filled again for each step by `build` (one kernel, capturable).
    The memory of the partial results may serve all plans that run one after the other on a stream.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        config: DecodeConfig | None = None,
        window: int | None = None,
    ) -> None:
        self.config = config or DecodeConfig()
        self.window = window
        self.num_workers = max(
            1, num_multiprocessors(torch.device(device)) * self.config.programs_per_sm // num_kv_heads
        )
        self.max_rows = max_rows
        self.head = torch.zeros(2, dtype=torch.int32, device=device)  # units per worker, units of all rows
        self.row_ends = torch.zeros(max_rows, dtype=torch.int32, device=device)  # units of each row and all before it
        self.first_segments = torch.zeros(self.num_workers, 8, dtype=torch.int32, device=device)
        self.counters = torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device)
        shape = (self.num_workers, 2, num_heads)
        self.part_values = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.part_stats = torch.empty(*shape, 2, dtype=torch.float32, device=device)  # maximum (log2), sum

    def build(self, seq_lens: Tensor, num_rows: int, slots: Tensor | None = None) -> None:
        """Cut the step's tokens over the workers. `seq_lens`, `slots` as in `decode_attention`."""
        assert num_rows <= self.max_rows, f"plan has room for {self.max_rows} rows, batch has {num_rows}"
        pdl = use_pdl(seq_lens)
        _plan_kernel[(self.num_workers,)](
            seq_lens, slots, self.head, self.row_ends, self.first_segments, num_rows, self.num_workers,
            WINDOW=self.window or 0, UNIT=self.config.unit_tokens, MIN_UNITS=self.config.min_units,
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
    slots: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row; `plan.build` ran on the same lengths. Arguments as `decode_attention_reference`."""
    num_rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "k and v cache need one layout"
    assert query.is_contiguous() and page_table.stride(1) == 1
    group = num_heads // num_kv_heads
    out = torch.empty_like(query)
    dim_block, combine_group = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    config = plan.config
    pdl = use_pdl(query)
    k_in, v_in = k_cache, v_cache
    is_nhd = k_cache.stride(2) == head_dim
    if config.tma:
        assert page_size % config.tile_tokens == 0 and config.unit_tokens % config.tile_tokens == 0
        k_in, v_in = (_descriptor(c, config.tile_tokens, is_nhd) for c in (k_cache, v_cache))
    if num_rows:
        _decode_kernel[(num_kv_heads, plan.num_workers)](
            query, k_in, v_in, page_table, seq_lens, slots, out,
            plan.head, plan.row_ends, plan.first_segments, plan.counters, plan.part_values, plan.part_stats,
            scale * 1.4426950408889634, page_table.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_BLOCK=max(16, combine_group),
            HEAD_DIM=head_dim, DIM_BLOCK=dim_block, PAGE_SIZE=page_size,
            WINDOW=plan.window or 0, TILE=config.tile_tokens, UNIT=config.unit_tokens, COMBINE_GROUP=combine_group,
            TMA=config.tma, NHD=is_nhd, COMBINE_PARTS=max(1, 8192 // (combine_group * dim_block)), PDL=pdl,
            num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out


def _descriptor(cache, tile, is_nhd):
    pages, page_size, heads, dim = cache.shape
    if is_nhd:
        return TensorDescriptor(cache, [pages * page_size, heads * dim], [heads * dim, 1], [tile, dim])
    return TensorDescriptor(cache, [pages * page_size * heads, dim], [dim, 1], [tile, dim])


@triton.jit
def _first_token(length, WINDOW: tl.constexpr, UNIT: tl.constexpr):
    """First token that a row of `length` sees, rounded down to a unit."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // UNIT * UNIT
    return first


@triton.jit(do_not_specialize=["num_rows"])
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
    start = worker * per_worker
    first_row = tl.sum((ends <= start).to(tl.int32) * inside.to(tl.int32), axis=0)
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


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    query_ptr, k_ptr, v_ptr, page_table_ptr, seq_lens_ptr, slots_ptr, out_ptr,
    head_ptr, row_ends_ptr, segments_ptr, counters_ptr, part_values_ptr, part_stats_ptr,
    scale, table_stride, page_stride, slot_stride, head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, COMBINE_GROUP: tl.constexpr, COMBINE_PARTS: tl.constexpr,
    TMA: tl.constexpr, NHD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, worker = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    per_worker = tl.load(head_ptr)
    position = worker * per_worker
    end = tl.minimum(position + per_worker, tl.load(head_ptr + 1))
    segment = segments_ptr + worker * 8
    row, table_row, length = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    row_begin, row_end = tl.load(segment + 3), tl.load(segment + 4)
    lanes = tl.arange(0, DIM_BLOCK)
    lane_inside = lanes < HEAD_DIM
    members = tl.arange(0, GROUP_BLOCK)
    member_inside = (members < GROUP)[:, None] & lane_inside[None, :]
    if not TMA:
        k_head_ptr, v_head_ptr = k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride
    while position < end:
        # The next row of this worker, if any, asked for now and needed at the end.
        has_next = row_end < end
        next_row_end = tl.load(row_ends_ptr + row + 1, mask=has_next, other=0)
        next_table_row = row + 1
        if slots_ptr is not None:
            next_table_row = tl.load(slots_ptr + row + 1, mask=has_next, other=0).to(tl.int32)
        next_length = tl.load(seq_lens_ptr + next_table_row, mask=has_next, other=0)
        q_rows = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + members
        q = tl.load(query_ptr + q_rows[:, None] * HEAD_DIM + lanes[None, :], mask=member_inside, other=0.0)
        origin = _first_token(length, WINDOW, UNIT)
        first_visible = 0
        if WINDOW > 0:
            first_visible = length - WINDOW
        begin = origin + (position - row_begin) * UNIT
        stop = tl.minimum(origin + (tl.minimum(end, row_end) - row_begin) * UNIT, length)
        table = page_table_ptr + table_row.to(tl.int64) * table_stride
        top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_BLOCK], tl.float32)
        values = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
        tokens = begin + tl.arange(0, TILE)
        if TMA:
            pages = tl.load(table + begin // PAGE_SIZE, mask=begin < stop, other=0)
        else:
            pages = tl.load(table + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
        for start in range(begin, stop, TILE):
            tokens = start + tl.arange(0, TILE)
            inside = tokens < stop
            # Page ids one tile ahead: the loads of K and V then wait for no other load.
            if TMA:
                next_pages = tl.load(table + (start + TILE) // PAGE_SIZE, mask=start + TILE < stop, other=0)
                if NHD:
                    line, lane = pages * PAGE_SIZE + start % PAGE_SIZE, kv_head * HEAD_DIM
                else:
                    line, lane = (pages * NUM_KV_HEADS + kv_head) * PAGE_SIZE + start % PAGE_SIZE, 0
                k = k_ptr.load([line, lane])
            else:
                next_pages = tl.load(table + (tokens + TILE) // PAGE_SIZE, mask=tokens + TILE < stop, other=0)
                offsets = pages.to(tl.int64) * page_stride + (tokens % PAGE_SIZE) * slot_stride
                load_mask = inside[:, None] & lane_inside[None, :]
                k = tl.load(k_head_ptr + offsets[:, None] + lanes[None, :], mask=load_mask, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            visible = inside
            if WINDOW > 0:
                visible = inside & (tokens >= first_visible)
            logits = tl.where(visible[None, :], logits, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, axis=1))
            # Before the first visible token the maximum is -inf, and -inf minus itself is NaN.
            base = new_top
            if WINDOW > 0:
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(logits - base[:, None])
            decay = tl.exp2(top - base)
            total = total * decay + tl.sum(weights, axis=1)
            if TMA:
                v = v_ptr.load([line, lane])
                v = tl.where(inside[:, None], v, 0.0)
            else:
                v = tl.load(v_head_ptr + offsets[:, None] + lanes[None, :], mask=load_mask, other=0.0)
            values = values * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top, pages = new_top, next_pages
        out_offsets = q_rows[:, None] * HEAD_DIM + lanes[None, :]
        first_worker, last_worker = row_begin // per_worker, (row_end - 1) // per_worker
        if first_worker == last_worker:
            values = values / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_ptr + out_offsets, values.to(out_ptr.dtype.element_ty), mask=member_inside)
        else:
            # The segment that opens a row lies at its worker's end (place 1), all others at their worker's beginning.
            place = worker * 2 + ((worker == first_worker) & (row_begin > worker * per_worker)).to(tl.int32)
            part_rows = (place * NUM_KV_HEADS + kv_head) * GROUP + members
            part_offsets = part_rows[:, None] * HEAD_DIM + lanes[None, :]
            tl.store(part_values_ptr + part_offsets, values, mask=member_inside)
            tl.store(part_stats_ptr + part_rows * 2, top, mask=members < GROUP)
            tl.store(part_stats_ptr + part_rows * 2 + 1, total, mask=members < GROUP)
            tl.debug_barrier()
            counter = counters_ptr + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_worker - first_worker:
                tl.store(counter, 0)
                _combine(
                    part_values_ptr, part_stats_ptr, out_ptr, row, kv_head, row_begin, per_worker, first_worker,
                    last_worker, NUM_KV_HEADS, GROUP, HEAD_DIM, DIM_BLOCK, COMBINE_GROUP, COMBINE_PARTS,
                )  # fmt: skip
        position, row_begin, row_end = row_end, row_end, next_row_end
        row, table_row, length = row + 1, next_table_row, next_length


@triton.jit
def _combine(
    part_values_ptr, part_stats_ptr, out_ptr, row, kv_head, row_begin, per_worker, first_worker, last_worker,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    COMBINE_GROUP: tl.constexpr, COMBINE_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one row and KV head, in the order of the workers."""
    members = tl.arange(0, COMBINE_GROUP)
    lanes = tl.arange(0, DIM_BLOCK)
    inside = (members < GROUP)[:, None] & (lanes < HEAD_DIM)[None, :]
    top = tl.full([COMBINE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([COMBINE_GROUP], tl.float32)
    values = tl.zeros([COMBINE_GROUP, DIM_BLOCK], tl.float32)
    for first in range(first_worker, last_worker + 1, COMBINE_PARTS):
        workers = first + tl.arange(0, COMBINE_PARTS)
        opens_row = (workers == first_worker) & (row_begin > workers * per_worker)
        part_rows = ((workers * 2 + opens_row.to(tl.int32)) * NUM_KV_HEADS + kv_head) * GROUP
        part_rows = part_rows[:, None] + members[None, :]
        present = (workers <= last_worker)[:, None] & (members < GROUP)[None, :]
        # Other programs wrote these: read them where they are coherent, in L2.
        tops = tl.load(part_stats_ptr + part_rows * 2, mask=present, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_stats_ptr + part_rows * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
        part_offsets = part_rows[:, :, None] * HEAD_DIM + lanes[None, None, :]
        part_inside = present[:, :, None] & (lanes < HEAD_DIM)[None, None, :]
        parts = tl.load(part_values_ptr + part_offsets, mask=part_inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay, weights = tl.exp2(top - base), tl.exp2(tops - base[None, :])
        total = total * decay + tl.sum(totals * weights, axis=0)
        values = values * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        top = new_top
    values = values / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + members
    out_offsets = out_rows[:, None] * HEAD_DIM + lanes[None, :]
    tl.store(out_ptr + out_offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
