"""Matrix products with a weight, alone and fused with the small operation before them."""

import torch.nn.functional as F
from torch import Tensor

from minisgl_worker.kernels.activation import silu_mul
from minisgl_worker.kernels.norm import add_rms_norm, rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], plus bias [out]; -> [num_tokens, out]."""
    return F.linear(x, weight, bias)


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` (or `rms_norm` of x where there is no residual yet), then `linear`.

    Returns:
        (product [num_tokens, out], new residual [num_tokens, in]).
    """
    if residual is None:
        return linear(rms_norm(x, norm_weight, eps), weight, bias), x
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), total


def silu_mul_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu_mul` of gate_up [num_tokens, 2 * in], then `linear`; -> [num_tokens, out]."""
    return linear(silu_mul(gate_up), weight, bias)
