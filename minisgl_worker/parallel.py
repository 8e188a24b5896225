"""Tensor parallelism: which part of a layer a rank holds, and how the ranks combine their parts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """This rank's place among the ranks that share a model. With one rank, every operation returns its input."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: str, device: torch.device) -> "ParallelGroup":
        """Join the other ranks through a file in the engine's private folder, so that nothing listens beyond loopback.

        Args:
            rendezvous: file:// URL, the same for every rank; not used for one rank.
        """
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return cls(rank, size)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place where there are several."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' [rows, n] side by side, in rank order: [rows, size * n]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def share(self, count: int, what: str) -> int:
        """This rank's share of `count` equal parts. Raises ModelLoadError when they do not divide."""
        if count % self.size:
            raise ModelLoadError(f"{count} {what} do not divide over tp_size {self.size}")
        return count // self.size
