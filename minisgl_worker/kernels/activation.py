"""The gated activation between the two halves of an MLP."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from minisgl_worker.kernels.dispatch import use_triton
from minisgl_worker.kernels.native import VECTOR, kernels_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the two halves of the last dimension.

    Args:
        gate_up: [num_tokens, 2 * intermediate] any float dtype.
    Returns:
        [num_tokens, intermediate], the same dtype. silu is rounded to it before the product.
    """
    if use_triton(gate_up):
        from minisgl_worker.kernels import activation_triton  # Triton is absent where there is no GPU

        return activation_triton.gated_mul(gate_up, is_silu=True)
    if gate_up.shape[-1] % (2 * VECTOR) == 0 and (native := kernels_for(gate_up)) is not None:
        return native.silu_mul(gate_up)
    return silu_mul_reference(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation of gelu; shapes and rounding as in `silu_mul`."""
    if use_triton(gate_up):
        from minisgl_worker.kernels import activation_triton  # Triton is absent where there is no GPU

        return activation_triton.gated_mul(gate_up, is_silu=False)
    return gelu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gelu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# By the name in config.json (`model_config.HIDDEN_ACTS`).
GATED_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu_mul, "gelu_pytorch_tanh": gelu_mul}
)
