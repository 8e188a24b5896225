"""Triton kernels of `kernels.linear`: few rows by CUDA cores with the operation in front fused in, more rows by tensor cores.

Few rows: one program holds whole rows of the weight; they are loaded before the kernel waits for its predecessor, so with
programmatic dependent launch the weights stream while the kernel in front still runs.

More rows: tiles of weight rows, the inner dimension split over programs where the tiles alone would leave processors idle.
The program that finishes a tile last adds the parts in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_worker.kernels.activation_triton import silu_mul_tile
from minisgl_worker.kernels.launch import use_pdl


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Launch parameters of the few-rows kernel."""

    rows_per_program: int = 4
    block_k: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Launch parameters of the tensor-core kernel."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 128
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = False  # the weight as the left operand, for fewer than 64 rows
    tma: bool = False  # tiles by the bulk tensor copy engine


PLAIN, NORM, ADD_NORM, SILU_MUL = 0, 1, 2, 3


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, config: GemvConfig) -> Tensor:
    """`linear` of at most 4 rows."""
    return _launch_gemv(PLAIN, x, None, None, 0.0, weight, bias, config)[0]


def norm_gemv(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None,
    config: GemvConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_linear` of at most 4 rows."""
    mode = NORM if residual is None else ADD_NORM
    return _launch_gemv(mode, x, residual, norm_weight, eps, weight, bias, config)


def silu_mul_gemv(gate_up: Tensor, weight: Tensor, bias: Tensor | None, config: GemvConfig) -> Tensor:
    """`silu_mul_linear` of at most 4 rows."""
    return _launch_gemv(SILU_MUL, gate_up, None, None, 0.0, weight, bias, config)[0]


def _launch_gemv(
    mode: int, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float, weight: Tensor,
    bias: Tensor | None, config: GemvConfig,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, (num_outputs, width) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_outputs)
    total = torch.empty_like(x) if mode == ADD_NORM else x
    block_k = min(config.block_k, triton.next_power_of_2(width))
    pdl = use_pdl(x)
    _gemv_kernel[(triton.cdiv(num_outputs, config.rows_per_program),)](
        x, residual, norm_weight, weight, bias, out, total, num_outputs, x.stride(0), weight.stride(0), eps,
        MODE=mode, NUM_ROWS=num_rows, WIDTH=width, BLOCK_N=config.rows_per_program, BLOCK_K=block_k,
        NUM_BLOCKS=triton.cdiv(width, block_k), WIDTH_BLOCK=triton.next_power_of_2(width), PDL=pdl,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out, total


@triton.jit
def _gemv_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr,
    num_outputs, x_stride, weight_stride, eps,
    MODE: tl.constexpr, NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, WIDTH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    outputs = program * BLOCK_N + tl.arange(0, BLOCK_N)
    output_inside = outputs < num_outputs
    lanes = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride
    weight = tl.load(weight_rows + lanes[None, :], mask=output_inside[:, None] & (lanes < WIDTH)[None, :], other=0.0)
    norm_weight = lanes
    if MODE == 1 or MODE == 2:
        norm_weight = tl.load(norm_weight_ptr + lanes, mask=lanes < WIDTH, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(NUM_ROWS):
        scale = 1.0
        if MODE == 1 or MODE == 2:
            scale = _norm_scale(
                x_ptr + row * x_stride, residual_ptr + row * WIDTH if MODE == 2 else None,
                total_ptr + row * WIDTH, program, eps, MODE, WIDTH, WIDTH_BLOCK,
            )  # fmt: skip
        x_row_ptr = x_ptr + row * x_stride
        residual_row_ptr = residual_ptr + row * WIDTH if MODE == 2 else None
        x = _gemv_input(x_row_ptr, residual_row_ptr, norm_weight, lanes, scale, MODE, WIDTH)
        total = weight.to(tl.float32) * x[None, :]
        for block in range(1, NUM_BLOCKS):
            columns = block * BLOCK_K + lanes
            inside = columns < WIDTH
            tile = tl.load(weight_rows + columns[None, :], mask=output_inside[:, None] & inside[None, :], other=0.0)
            norm_tile = norm_weight
            if MODE == 1 or MODE == 2:
                norm_tile = tl.load(norm_weight_ptr + columns, mask=inside, other=0.0)
            x = _gemv_input(x_row_ptr, residual_row_ptr, norm_tile, columns, scale, MODE, WIDTH)
            total += tile.to(tl.float32) * x[None, :]
        result = tl.sum(total, axis=1)
        if bias_ptr is not None:
            result += tl.load(bias_ptr + outputs, mask=output_inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_outputs + outputs, result.to(out_ptr.dtype.element_ty), mask=output_inside)


@triton.jit
def _gemv_input(x_ptr, residual_ptr, norm_weight, columns, scale, MODE: tl.constexpr, WIDTH: tl.constexpr):
    """Values of one row that meet the weight, fp32: the inputs after the operation in front."""
    inside = columns < WIDTH
    x = tl.load(x_ptr + columns, mask=inside, other=0.0)
    if MODE == 2:
        residual = tl.load(residual_ptr + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    if MODE == 1 or MODE == 2:
        x = ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * norm_weight.to(tl.float32)).to(x.dtype)
    if MODE == 3:
        up = tl.load(x_ptr + WIDTH + columns, mask=inside, other=0.0)
        x = silu_mul_tile(x, up)
    return x.to(tl.float32)


@triton.jit
def _norm_scale(
    x_ptr, residual_ptr, total_ptr, program, eps, MODE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr
):
    """The factor of the RMS norm of one row; program 0 also writes the new residual."""
    columns = tl.arange(0, WIDTH_BLOCK)
    inside = columns < WIDTH
    x = tl.load(x_ptr + columns, mask=inside, other=0.0)
    if MODE == 2:
        residual = tl.load(residual_ptr + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if program == 0:
            tl.store(total_ptr + columns, x, mask=inside)
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: MatmulConfig, parts: Tensor, counters: Tensor
) -> Tensor:
    """`linear` by tensor cores.

    Args:
        parts: fp32 scratch of at least split_k * num_rows * num_outputs values; unused where split_k is 1.
        counters: i32 scratch, zero before the first call and left zero, one per tile of the output.
    """
    num_rows, (num_outputs, width) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, num_outputs)
    tiles_m, tiles_n = triton.cdiv(num_rows, config.block_m), triton.cdiv(num_outputs, config.block_n)
    blocks_per_split = triton.cdiv(triton.cdiv(width, config.block_k), config.split_k)
    pdl = use_pdl(x)
    left, right = x, weight
    if config.tma:
        left = TensorDescriptor.from_tensor(x, [config.block_m, config.block_k])
        right = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
    _matmul_kernel[(tiles_m * tiles_n, config.split_k)](
        left, right, bias, out, parts, counters, num_rows, num_outputs, width, x.stride(0), weight.stride(0),
        blocks_per_split, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT=config.split_k > 1, EVEN_K=width % config.block_k == 0, SWAP=config.swap, TMA=config.tma, PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, parts_ptr, counters_ptr, num_rows, num_outputs, width, x_stride,
    weight_stride, blocks_per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    rows = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, output_inside = rows < num_rows, outputs < num_outputs
    lanes = tl.arange(0, BLOCK_K)
    first_block = split * blocks_per_split
    last_block = tl.minimum(first_block + blocks_per_split, tl.cdiv(width, BLOCK_K))
    if not TMA:
        x_rows = x_ptr + tl.where(row_inside, rows, 0)[:, None] * x_stride + lanes[None, :]
        weight_rows = weight_ptr + tl.where(output_inside, outputs, 0).to(tl.int64)[:, None] * weight_stride + lanes[None, :]
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first_block, last_block):
        start = block * BLOCK_K
        if TMA:
            x = x_ptr.load([tile % tiles_m * BLOCK_M, start])
            weight = weight_ptr.load([tile // tiles_m * BLOCK_N, start])
        elif EVEN_K:
            x = tl.load(x_rows + start)
            weight = tl.load(weight_rows + start)
        else:
            x = tl.load(x_rows + start, mask=(start + lanes < width)[None, :], other=0.0)
            weight = tl.load(weight_rows + start, mask=(start + lanes < width)[None, :], other=0.0)
        if SWAP:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if SWAP:
        offsets = outputs[:, None] + rows[None, :].to(tl.int64) * num_outputs
        inside = output_inside[:, None] & row_inside[None, :]
    else:
        offsets = outputs[None, :] + rows[:, None].to(tl.int64) * num_outputs
        inside = output_inside[None, :] & row_inside[:, None]
    is_last = True
    if SPLIT:
        num_splits = tl.num_programs(1)
        part_size = num_rows.to(tl.int64) * num_outputs
        tl.store(parts_ptr + split * part_size + offsets, total, mask=inside)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.load(parts_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
            for part in range(1, num_splits):
                total += tl.load(parts_ptr + part * part_size + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + outputs, mask=output_inside, other=0.0).to(tl.float32)
            total += bias[:, None] if SWAP else bias[None, :]
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)
