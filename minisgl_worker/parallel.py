"""Tensor parallelism: which device and which part of a layer a rank has, and how the ranks combine their parts.

Every rank makes the same choices from the same Steps, so all of them call the same operations in the same order. All of
`torch.distributed` is behind `Collectives`.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.errors import ModelLoadError, PeerLost

# Far beyond any bound of the engine's, which knows better than the waiting rank whose fault a wait is.
COLLECTIVE_TIMEOUT = timedelta(days=30)
VOCABULARY_MULTIPLE = 16  # rows of a rank's part of a shared vocabulary: products of other heights are slower
LOOPBACK = "lo"


class Collectives(Protocol):
    """How ranks exchange tensors. Each call is made by every rank, with the same shape and dtype."""

    def gather(self, x: Tensor) -> Tensor:
        """x [...] of any dtype -> every rank's x in rank order, [num_ranks, ...] of that dtype."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [...] of a float dtype, the same bits on each of them. May overwrite x."""
        ...


class ParallelGroup:
    """This rank's place among the ranks that share a model. With one rank, every operation returns its input.

    Attributes:
        num_collectives: operations with the other ranks that this one has entered so far. Of ranks that stand still,
            the one with the fewest is what the others wait for.
    """

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None):
        self.rank, self.size = rank, size
        self.num_collectives = 0
        self._collectives = collectives

    def join(self, rendezvous: str, device: torch.device) -> None:
        """Meet the other ranks through a file, so that nothing listens beyond loopback.

        Nothing is done for one rank, or if the ranks were given their collectives.

        Args:
            rendezvous: file:// URL in the engine's private folder, the same for every rank.

        Raises:
            PeerLost: another rank ended meanwhile.
        """
        if self.size == 1 or self._collectives is not None:
            return
        stay_on_this_machine()
        self.num_collectives += 1
        with _peer_errors():
            is_cuda = device.type == "cuda"
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                init_method=rendezvous,
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=device if is_cuda else None,
            )
        self._collectives = NcclCollectives() if is_cuda else GlooCollectives()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [...], the same bits on each of them; x is not to be used any more."""
        return x if self.size == 1 else self._call(lambda collectives: collectives.sum(x))

    def gather(self, x: Tensor) -> Tensor:
        """x [...] -> every rank's x in rank order, [size, ...]."""
        return x.unsqueeze(0) if self.size == 1 else self._call(lambda collectives: collectives.gather(x.contiguous()))

    def gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' [rows, n] side by side, in rank order: [rows, size * n]."""
        return x if self.size == 1 else self.gather(x).transpose(0, 1).flatten(1)

    def wait_for_all(self, device: torch.device) -> None:
        """Return when every rank has come here and all that was launched on `device` before is done."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=device)).item()

    def _call(self, operation: Callable[[Collectives], Tensor]) -> Tensor:
        assert self._collectives is not None, "the group has not been joined"
        self.num_collectives += 1
        with _peer_errors():
            return operation(self._collectives)


class GlooCollectives:
    """Between processes on CPUs."""

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return _gather(x)

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`. Gloo's own sum has an order that depends on the size of x, and with it a row's bits.

        At the sizes of decode steps it also takes three times as long, measured with two ranks.
        """
        return sum_in_rank_order(self.gather(x.contiguous()))


class NcclCollectives:
    """Between GPUs. Every operation may be captured in a CUDA graph."""

    def gather(self, x: Tensor) -> Tensor:
        """See `Collectives`."""
        return _gather(x)

    def sum(self, x: Tensor) -> Tensor:
        """See `Collectives`. The order of the sum is NCCL's, the same in every run of one configuration."""
        dist.all_reduce(x)
        return x


def _gather(x: Tensor) -> Tensor:
    """`Collectives.gather` of a contiguous x by torch.distributed."""
    out = x.new_empty((dist.get_world_size(), *x.shape))
    # torch 2.13 renames it, and warns of the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out.view(-1), x.view(-1))
    return out


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """[num_ranks, ...] -> [...]: ((rank 0 + rank 1) + rank 2) + ..., in at least fp32, rounded once."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def share_vocabulary(vocab_size: int, group: ParallelGroup) -> tuple[int, int]:
    """(rows of each rank's part, the first token id of this one's). The last parts may have rows beyond the end."""
    if group.size == 1:
        return vocab_size, 0
    unit = group.size * VOCABULARY_MULTIPLE
    rows = -(-vocab_size // unit) * VOCABULARY_MULTIPLE
    return rows, group.rank * rows


def choose_device(name: str, group: ParallelGroup) -> torch.device:
    """This rank's device. Raises ModelLoadError where "cuda" is asked for and there are not as many as ranks."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if group.size > count:
        why = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise ModelLoadError(
            f"device cuda has {count} visible NVIDIA GPUs{why}, tp_size {group.size} needs one for each rank; "
            f"{'use a smaller tp_size, or device=cpu' if count else 'use device=cpu'}"
        )
    torch.cuda.set_device(group.rank)
    return torch.device("cuda", group.rank)


def share_cpu_threads(num_ranks: int) -> None:
    """Divide this machine's cores among the ranks, which share it where they run on CPUs.

    One rank keeps torch's own choice: as many threads as the process may use cores, or what OMP_NUM_THREADS says. Ranks
    that all took every core would wait for each other in each matrix product.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))


def stay_on_this_machine() -> None:
    """Have gloo and NCCL use loopback alone, and NCCL no multicast, which not every virtual machine passes through."""
    if LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ.update(GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=LOOPBACK)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@contextmanager
def _peer_errors() -> Iterator[None]:
    """What goes wrong inside an exchange is, as a rule, the other side's end."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo raises nothing more precise; NCCL's errors are a subclass
        raise PeerLost(f"lost the other ranks: {error}") from error
