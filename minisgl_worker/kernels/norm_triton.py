"""Triton kernel of `kernels.norm`: one program per row."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    normed = rows.new_empty(rows.shape)
    total = normed if residual is None else rows.new_empty(rows.shape)
    block = triton.next_power_of_2(hidden)
    pdl = use_pdl(x, rows.shape[0])
    if rows.shape[0]:
        _rms_norm_kernel[(rows.shape[0],)](
            rows, rows if residual is None else residual.reshape(-1, hidden), weight, normed, total, hidden,
            rows.stride(0), eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block, PDL=pdl,
            num_warps=min(16, max(1, block // 256)), launch_pdl=pdl,
        )  # fmt: skip
    return normed.view(x.shape), total.view(x.shape)


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, hidden, row_stride, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * hidden + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * hidden + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row * hidden + columns, normed.to(x.dtype), mask=inside)
