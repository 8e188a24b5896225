"""Launch options shared by the Triton kernels."""

import functools

import torch
from torch import Tensor

MAX_PDL_PROGRAMS = 2048  # the wait costs each program time, which in a large grid nothing hides


def use_pdl(x: Tensor, num_programs: int = 1) -> bool:
    """Whether a kernel on x's device may start before the kernel in front of it has ended (Hopper and later).

    The kernel waits (`gdc_wait`) for the end of its predecessor before it reads what a kernel wrote, and before it
    writes. Ahead of that it may read constants. A kernel lets its successor start when all its programs have said
    `gdc_launch_dependents`; one that says so only after its own wait promises more: the successor may at once read all
    that is older than the predecessor.
    """
    return x.is_cuda and num_programs <= MAX_PDL_PROGRAMS and _capability(x.device)[0] >= 9


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; a fixed plausible number where there is no GPU (the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
