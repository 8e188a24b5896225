"""Matrix products with a weight."""

import torch.nn.functional as F
from torch import Tensor

from minisgl_worker.kernels.dispatch import use_triton
from minisgl_worker.kernels.launch import use_pdl
from minisgl_worker.kernels.native import kernels_for

MAX_TRITON_ROWS = 16  # from here on the vendor's kernels win, measured on H200


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_tokens, in] times the transpose of weight [out, in], plus bias [out]; -> [num_tokens, out].

    All are of one float dtype. Up to 16 tokens on Hopper and later are served by kernels of this package, which read
    the weight at close to the memory's rate and, launched in a row, overlap. They keep scratch memory per device: one
    stream at a time.
    """
    if 0 < x.shape[0] <= MAX_TRITON_ROWS and use_triton(x) and x.dtype.itemsize == 2 and use_pdl(x):
        from minisgl_worker.kernels import linear_triton  # Triton is absent where there is no GPU

        if linear_triton.can_serve(x, weight):
            return linear_triton.linear(x, weight, bias)
    if (native := kernels_for(x)) is not None and native.serves_linear(x):
        return native.linear(x, weight, bias)
    return F.linear(x, weight, bias)
