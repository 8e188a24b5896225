"""Triton kernels of `kernels.step`: one program each, as a step has at most some hundred rows."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl
from minisgl_worker.kernels.step import DIFF_HEADER, DeviceSlots, StepInputs


def begin_step(diff: Tensor, max_rows: int, slots: DeviceSlots, inputs: StepInputs, page_size: int) -> None:
    """See `kernels.step.begin_step`."""
    num_rows, num_slots = len(inputs.slots), len(slots.last_token) - 1
    pdl = use_pdl(diff)
    _begin_kernel[(1,)](
        diff, slots.last_token, slots.seq_lens, slots.page_table, slots.temperature, slots.seeds,
        inputs.slots, inputs.tokens, inputs.positions, inputs.next_positions, inputs.kv_locations,
        inputs.temperature, inputs.seeds, num_rows, num_slots, slots.page_table.stride(0),
        FIRST_SLOT=DIFF_HEADER, FIRST_GRANT=DIFF_HEADER + max_rows, PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(num_rows), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


def finish_step(inputs: StepInputs, slots: DeviceSlots, tokens: Tensor, failed: Tensor, out: Tensor) -> None:
    """See `kernels.step.finish_step`."""
    num_rows = len(inputs.slots)
    pdl = use_pdl(out)
    _finish_kernel[(1,)](
        inputs.slots, tokens, failed, slots.last_token, out, num_rows,
        BLOCK=triton.next_power_of_2(num_rows), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_slots", "table_stride"])
def _begin_kernel(
    diff_ptr, last_token_ptr, seq_lens_ptr, page_table_ptr, slot_temperature_ptr, slot_seeds_ptr,
    slots_ptr, tokens_ptr, positions_ptr, next_positions_ptr, kv_locations_ptr, temperature_ptr, seeds_ptr,
    num_rows, num_slots, table_stride,
    FIRST_SLOT: tl.constexpr, FIRST_GRANT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = rows < num_rows
    is_grant = rows < tl.load(diff_ptr)  # at most one for each row
    grant = diff_ptr + FIRST_GRANT + rows * 3
    granted = tl.load(grant, mask=is_grant, other=0).to(tl.int64) * table_stride + tl.load(grant + 1, is_grant, 0)
    tl.store(page_table_ptr + granted, tl.load(grant + 2, mask=is_grant, other=0), mask=is_grant)
    # A row may need the page that another thread has just granted it.
    tl.debug_barrier()
    slots = tl.load(diff_ptr + FIRST_SLOT + rows, mask=inside, other=0)
    is_dummy = slots == num_slots
    positions = tl.where(is_dummy, 0, tl.load(seq_lens_ptr + slots, mask=inside, other=0))
    tl.store(seq_lens_ptr + slots, positions + 1, mask=inside)
    page = tl.load(page_table_ptr + slots.to(tl.int64) * table_stride + positions // PAGE_SIZE, mask=inside, other=0)
    tl.store(slots_ptr + rows, slots, mask=inside)
    tl.store(tokens_ptr + rows, tl.load(last_token_ptr + slots, mask=inside, other=0), mask=inside)
    tl.store(positions_ptr + rows, positions.to(tl.int64), mask=inside)
    tl.store(next_positions_ptr + rows, (positions + 1).to(tl.int64), mask=inside)
    locations = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    tl.store(kv_locations_ptr + rows, locations, mask=inside)
    tl.store(temperature_ptr + rows, tl.load(slot_temperature_ptr + slots, mask=inside, other=0.0), mask=inside)
    tl.store(seeds_ptr + rows, tl.load(slot_seeds_ptr + slots, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    slots_ptr, tokens_ptr, failed_ptr, last_token_ptr, out_ptr, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    rows = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + rows, mask=inside, other=0)
    failed = tl.load(failed_ptr + rows, mask=inside, other=0).to(tl.int32)
    tl.store(last_token_ptr + slots, tokens, mask=inside)
    tl.store(out_ptr + rows, tokens.to(tl.int32) | (failed << 31), mask=inside)
