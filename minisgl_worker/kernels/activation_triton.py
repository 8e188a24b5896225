"""Triton kernel of `kernels.activation`: one program per row and block of columns."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_worker.kernels.launch import use_pdl

BLOCK = 1024


def gated_mul(gate_up: Tensor, *, is_silu: bool) -> Tensor:
    """See `kernels.activation.silu_mul` and, with another activation, `gelu_mul`."""
    num_rows, width = gate_up.shape
    out = gate_up.new_empty(num_rows, width // 2)
    num_blocks = triton.cdiv(width // 2, BLOCK)
    pdl = use_pdl(gate_up, num_rows * num_blocks)
    if num_rows:
        _gated_mul_kernel[(num_rows, num_blocks)](
            gate_up, out, width // 2, gate_up.stride(0), BLOCK=BLOCK, IS_SILU=is_silu, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit
def activate(gate, IS_SILU: tl.constexpr):
    """silu, or gelu with tanh, of fp32 values."""
    # gelu with tanh is x * sigmoid(2u) for the polynomial u inside the tanh.
    inside = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inside))


@triton.jit
def _gated_mul_kernel(
    gate_up_ptr, out_ptr, width, row_stride, BLOCK: tl.constexpr, IS_SILU: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    activated = activate(gate.to(tl.float32), IS_SILU).to(gate.dtype)
    out = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * width + columns, out, mask=inside)
