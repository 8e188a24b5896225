"""Which implementation of a kernel serves a tensor."""

import torch
from torch import Tensor

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def use_triton(x: Tensor) -> bool:
    """Whether the Triton kernel serves `x`: a CUDA tensor of up to 32 bits per value; plain torch serves the rest."""
    return x.is_cuda and x.dtype in TRITON_DTYPES


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of intermediate values: fp32, and fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
