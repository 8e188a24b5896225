"""Triton kernels of `kernels.linear` for few rows.

One row (two where the weight is small): each program holds whole rows of the weight. They are loaded before
the kernel waits for its predecessor, so with programmatic dependent launch the weight streams while the kernel in front
runs.

Up to 16 rows: tensor cores, the weight as the left operand, so that 64 of its rows meet 16 tokens. Where the tiles of
the output are too few to busy all processors, the inner dimension is split over programs; the one that finishes a tile
last adds the parts in order.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_worker.kernels.launch import use_pdl

MAX_GEMV_WIDTH = 8192
MAX_ROW_WIDTH = 4096  # up to here a program holds whole rows of the weight in registers
MAX_COUNTERS = 4096
BLOCK_M, BLOCK_N = 16, 64


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch parameters of the kernel for one row."""

    rows_per_program: int
    block_k: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Launch parameters of the kernel for up to 16 rows."""

    block_k: int
    split_k: int
    num_stages: int


def gemv_config(num_outputs: int, width: int) -> GemvConfig:
    """Measured on H200 over the shapes of Qwen3-0.6B and 14B, cold weights."""
    if width <= MAX_ROW_WIDTH:
        block_k = triton.next_power_of_2(width)
        return GemvConfig(8 if num_outputs > 4096 else 4, block_k, 8 if block_k > 2048 else 4)
    return GemvConfig(4, 512, 4) if num_outputs < 6144 else GemvConfig(8, 1024, 4)


def matmul_config(num_outputs: int, width: int) -> MatmulConfig:
    """Measured as `gemv_config`: few tiles are split until each processor has about two programs."""
    tiles = triton.cdiv(num_outputs, BLOCK_N)
    if tiles < 48:
        return MatmulConfig(256, max(1, min(8, triton.cdiv(width, 256) // 2)), 3)
    if tiles <= 80 and width >= 4096:
        return MatmulConfig(128, 3, 4)
    return MatmulConfig(256, 1, 3) if num_outputs < 16384 else MatmulConfig(128, 1, 4)


def can_serve(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels' layout needs are met; bulk copies want rows that begin at multiples of 16 bytes."""
    is_aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (x, weight))
    return is_aligned and x.stride(1) == 1 and weight.stride(1) == 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `kernels.linear.linear`; x has 1 to 16 rows."""
    num_outputs, width = weight.shape
    is_small = max(num_outputs, width) <= 4096
    if (x.shape[0] == 1 and width <= MAX_GEMV_WIDTH) or (x.shape[0] == 2 and is_small):
        return gemv(x, weight, bias, gemv_config(num_outputs, width))
    return matmul(x, weight, bias, matmul_config(num_outputs, width))


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, config: GemvConfig) -> Tensor:
    """`linear` without tensor cores; each further row costs nearly as much as the first."""
    num_rows, (num_outputs, width) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_outputs)
    block_k = min(config.block_k, triton.next_power_of_2(width))
    pdl = use_pdl(x)
    _gemv_kernel[(triton.cdiv(num_outputs, config.rows_per_program),)](
        x, weight, bias, out, num_outputs, x.stride(0), weight.stride(0),
        NUM_ROWS=num_rows, WIDTH=width, BLOCK_N=config.rows_per_program, BLOCK_K=block_k,
        NUM_BLOCKS=triton.cdiv(width, block_k), PDL=pdl, num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, config: MatmulConfig) -> Tensor:
    """`linear` by tensor cores; any number of rows, meant for at most 16."""
    num_rows, (num_outputs, width) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_outputs)
    tiles_m, tiles_n = triton.cdiv(num_rows, BLOCK_M), triton.cdiv(num_outputs, BLOCK_N)
    split_k = config.split_k if tiles_m * tiles_n <= MAX_COUNTERS else 1
    parts = x.new_empty(split_k if split_k > 1 else 0, num_rows, num_outputs, dtype=torch.float32)
    pdl = use_pdl(x)
    _matmul_kernel[(tiles_m * tiles_n, split_k)](
        TensorDescriptor.from_tensor(x, [BLOCK_M, config.block_k]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, config.block_k]),
        bias, out, parts, _counters(x.device), num_rows, num_outputs, width,
        triton.cdiv(triton.cdiv(width, config.block_k), split_k),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=config.block_k, SPLIT=split_k > 1, PDL=pdl,
        num_warps=4, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """How many parts of each output tile are done; every kernel leaves zeros."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_outputs, x_stride, weight_stride,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_inside = outputs < num_outputs
    lanes = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(weight_rows + lanes[None, :], mask=output_inside[:, None] & (lanes < WIDTH)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(NUM_ROWS):
        x = tl.load(x_ptr + row * x_stride + lanes, mask=lanes < WIDTH, other=0.0)
        total = first.to(tl.float32) * x.to(tl.float32)[None, :]
        for block in range(1, NUM_BLOCKS):
            columns = block * BLOCK_K + lanes
            inside = columns < WIDTH
            tile = tl.load(weight_rows + columns[None, :], mask=output_inside[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
            total += tile.to(tl.float32) * x.to(tl.float32)[None, :]
        result = tl.sum(total, axis=1)
        if bias_ptr is not None:
            result += tl.load(bias_ptr + outputs, mask=output_inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_outputs + outputs, result.to(out_ptr.dtype.element_ty), mask=output_inside)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def _matmul_kernel(
    x_tiles, weight_tiles, bias_ptr, out_ptr, parts_ptr, counters_ptr, num_rows, num_outputs, width, blocks_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    first_row, first_output = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    rows, outputs = first_row + tl.arange(0, BLOCK_M), first_output + tl.arange(0, BLOCK_N)
    first_block = split * blocks_per_split
    last_block = tl.minimum(first_block + blocks_per_split, tl.cdiv(width, BLOCK_K))
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first_block, last_block):
        # What lies outside comes back as zeros.
        x = x_tiles.load([first_row, block * BLOCK_K])
        weight = weight_tiles.load([first_output, block * BLOCK_K])
        total = tl.dot(weight, tl.trans(x), total)
    offsets = outputs[:, None] + rows[None, :].to(tl.int64) * num_outputs
    inside = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    is_last = True
    if SPLIT:
        num_splits = tl.num_programs(1)
        part_size = num_rows.to(tl.int64) * num_outputs
        tl.store(parts_ptr + split * part_size + offsets, total, mask=inside)
        # All threads' stores come before the counter's step, which publishes them.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.load(parts_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
            for part in range(1, num_splits):
                total += tl.load(parts_ptr + part * part_size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
            total += bias.to(tl.float32)[:, None]
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)
