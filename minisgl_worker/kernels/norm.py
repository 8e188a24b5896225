"""RMS normalisation, alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from minisgl_worker.kernels.dispatch import compute_dtype, use_triton
from minisgl_worker.kernels.native import kernels_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension.

    The normalised value is rounded to the weight's dtype before their product, as the checkpoints were trained.

    Args:
        x: [..., hidden] any float dtype.
        weight: [hidden], x's dtype, or fp32 for a product that is rounded only once (Gemma).
    Returns:
        [..., hidden], x's dtype.
    """
    if use_triton(x):
        from minisgl_worker.kernels import norm_triton  # Triton is absent where there is no GPU

        return norm_triton.rms_norm(x, weight, eps)
    if weight.dtype == x.dtype and (native := kernels_for(x)) is not None:
        return native.rms_norm(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the sum; neither input is changed.

    Args:
        x, residual: [..., hidden], one dtype.
        weight: [hidden], the same dtype or fp32.
    Returns:
        (normed, new_residual), both [..., hidden].
    """
    if use_triton(x):
        from minisgl_worker.kernels import norm_triton  # Triton is absent where there is no GPU

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    if weight.dtype == x.dtype and (native := kernels_for(x)) is not None and residual.is_contiguous():
        return native.add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain torch."""
    wide = x.to(compute_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
