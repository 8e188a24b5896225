"""The first and the last operation of a decode step whose inputs and outputs all live on the device.

With them a captured graph holds a whole step: what the host knows arrives in one small buffer (`StepDiff`), everything
else is read from the slots' state, and the chosen tokens are left where the next step will look for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_worker.kernels.dispatch import use_triton

DIFF_HEADER = 1  # i32 values before the slots: the number of page grants


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """The slots' state on the device; the last slot is the dummy of padding rows, one token long in the dummy page."""

    last_token: Tensor  # [num_slots + 1] i64
    seq_lens: Tensor  # [num_slots + 1] i32, tokens in the cache
    page_table: Tensor  # [num_slots + 1, max_pages] i32
    temperature: Tensor  # [num_slots + 1] f32
    seeds: Tensor  # [num_slots + 1] i64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What `begin_step` gathers for the rows of a step."""

    slots: Tensor  # [num_rows] i32
    tokens: Tensor  # [num_rows] i64
    positions: Tensor  # [num_rows] i64, of those tokens
    next_positions: Tensor  # [num_rows] i64, of the tokens to be drawn
    kv_locations: Tensor  # [num_rows] i64
    temperature: Tensor  # [num_rows] f32
    seeds: Tensor  # [num_rows] i64

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "StepInputs":
        def wide() -> Tensor:
            return torch.zeros(num_rows, dtype=torch.int64, device=device)

        slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
        temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        return cls(slots, wide(), wide(), wide(), wide(), temperature, wide())


def diff_size(max_rows: int) -> int:
    """i32 values in a diff for up to `max_rows` rows: number of grants, a slot per row, (slot, index, page) per row."""
    return DIFF_HEADER + 4 * max_rows


def begin_step(diff: Tensor, max_rows: int, slots: DeviceSlots, inputs: StepInputs, page_size: int) -> None:
    """Apply the diff's page grants, then gather `inputs` for its first rows and count their tokens in.

    Args:
        diff: [diff_size(max_rows)] i32. Rows beyond the batch name the dummy slot, whose length stays 1.
        inputs: written; its number of rows is that of the step.
    """
    if use_triton(inputs.temperature):
        from minisgl_worker.kernels import step_triton  # Triton is absent where there is no GPU

        step_triton.begin_step(diff, max_rows, slots, inputs, page_size)
    else:
        begin_step_reference(diff, max_rows, slots, inputs, page_size)


def finish_step(inputs: StepInputs, slots: DeviceSlots, tokens: Tensor, failed: Tensor, out: Tensor) -> None:
    """Leave each row's token for the next step, and for the host: out [num_rows] i32, sign bit = failed row."""
    if use_triton(inputs.temperature):
        from minisgl_worker.kernels import step_triton  # Triton is absent where there is no GPU

        step_triton.finish_step(inputs, slots, tokens, failed, out)
    else:
        finish_step_reference(inputs, slots, tokens, failed, out)


def begin_step_reference(diff: Tensor, max_rows: int, slots: DeviceSlots, inputs: StepInputs, page_size: int) -> None:
    """`begin_step` in plain torch."""
    num_rows, dummy = len(inputs.slots), len(slots.last_token) - 1
    first_grant = DIFF_HEADER + max_rows
    grants = diff[first_grant : first_grant + 3 * int(diff[0])].view(-1, 3).to(torch.int64)
    slots.page_table[grants[:, 0], grants[:, 1]] = grants[:, 2].to(torch.int32)
    rows = diff[DIFF_HEADER : DIFF_HEADER + num_rows].to(torch.int64)
    positions = torch.where(rows == dummy, 0, slots.seq_lens[rows].to(torch.int64))
    slots.seq_lens[rows] = (positions + 1).to(torch.int32)
    pages = slots.page_table[rows, positions // page_size].to(torch.int64)
    inputs.slots.copy_(rows)
    inputs.tokens.copy_(slots.last_token[rows])
    inputs.positions.copy_(positions)
    inputs.next_positions.copy_(positions + 1)
    inputs.kv_locations.copy_(pages * page_size + positions % page_size)
    inputs.temperature.copy_(slots.temperature[rows])
    inputs.seeds.copy_(slots.seeds[rows])


def finish_step_reference(inputs: StepInputs, slots: DeviceSlots, tokens: Tensor, failed: Tensor, out: Tensor) -> None:
    """`finish_step` in plain torch."""
    slots.last_token[inputs.slots.to(torch.int64)] = tokens
    out.copy_(torch.where(failed, tokens - 2**31, tokens).to(torch.int32))
