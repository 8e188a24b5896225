"""Several ranks of one model in one process: a thread each, which exchange tensors through memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from minisgl_worker.layers import Place, WeightSource
from minisgl_worker.parallel import ParallelGroup, sum_in_rank_order

Outcome = TypeVar("Outcome")
WAIT_S = 60  # a rank that calls another operation than its peers, or none, fails here


class ThreadCollectives:
    """One rank's side; `places` and the barrier belong to all."""

    def __init__(self, rank: int, places: list[Tensor | None], barrier: threading.Barrier):
        self._rank, self._places, self._barrier = rank, places, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._places[self._rank] = x
        self._barrier.wait()
        parts = torch.stack(self._places)
        self._barrier.wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return sum_in_rank_order(self.gather(x))


def run_ranks(size: int, function: Callable[[ParallelGroup], Outcome]) -> list[Outcome]:
    """function(group) of every rank, at the same time; the outcomes in rank order."""
    barrier = threading.Barrier(size, timeout=WAIT_S)
    places: list[Tensor | None] = [None] * size

    def run(rank: int) -> Outcome:
        try:
            with torch.inference_mode():
                return function(ParallelGroup(rank, size, ThreadCollectives(rank, places, barrier)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def whole_place() -> Place:
    return Place(ParallelGroup(), torch.float32, torch.device("cpu"))


def place_of(group: ParallelGroup) -> Place:
    return Place(group, torch.float32, torch.device("cpu"))


def fill_whole(sources: list[WeightSource]) -> dict[str, Tensor]:
    """Random values for the weights of a layer that is not shared; returns them by name."""
    values = {}
    generator = torch.Generator().manual_seed(0)
    for source in sources:
        assert source.target.shape == source.full_shape, f"{source.name} is not whole"
        source.target.copy_(torch.randn(source.full_shape, generator=generator) * 0.3)
        values[source.name] = source.target.clone()
    return values


def fill_share(sources: list[WeightSource], values: dict[str, Tensor]) -> None:
    """A rank's slices of the whole layer's weights."""
    assert {source.name for source in sources} == values.keys()
    for source in sources:
        length = source.full_shape[source.dim] if source.length is None else source.length
        source.target.copy_(values[source.name].narrow(source.dim, source.start, length) if length else source.target)
