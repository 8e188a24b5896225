"""Streams a checkpoint's tensors, several at a time, straight into their fused and sharded places.

A model says what it wants (`WeightSource`); that the checkpoint has it was checked from the headers when the model was
resolved. Only a rank's own rows are read. Host memory beside the weights' places is a few buffers for each thread.
"""

import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.families import FAMILIES
from minisgl.gguf_header import GgufTensor
from minisgl.model_folder import ModelConfig, ModelFolder
from minisgl_worker.layers import WeightSource
from minisgl_worker.tensor_reader import GgufReader, SafetensorsReader

DUMMY_STD = 0.02  # never zeros: they run faster than real weights and hide wrong indexing
BUFFER_BYTES = 16 * 2**20  # of one read; two buffers per thread
MAX_THREADS = 8  # more do not read faster from a disk's cache, measured

Reader = SafetensorsReader | GgufReader


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How long it took to read weights."""

    num_bytes: int  # of the tensors, as the files have them
    seconds: float

    def describe(self) -> str:
        """A few words for the log."""
        gigabytes = self.num_bytes / 1e9
        return f"{gigabytes:.2f} GB of weights in {self.seconds:.1f} s ({self.seconds / gigabytes:.2f} s per GB)"


def load_weights(sources: Iterable[WeightSource], folder: ModelFolder, *, show_progress: bool = False) -> LoadReport:
    """Fill every target from the checkpoint.

    Args:
        show_progress: show a bar on stderr, if it is a terminal.

    Raises:
        ModelLoadError: a file cannot be read to its end; names it.
    """
    started = time.monotonic()
    wanted: dict[str, list[WeightSource]] = defaultdict(list)
    for source in sources:
        assert folder.tensors[source.name].shape == source.full_shape, f"{source.name}: the checkpoint's check differs"
        wanted[source.name].append(source)
    num_bytes = sum(folder.tensors[name].num_bytes for name in wanted)
    device = next(iter(wanted.values()))[0].target.device
    with ExitStack() as stack:
        silent = None if show_progress else True  # None: where stderr is no terminal
        bar = stack.enter_context(tqdm(total=num_bytes, desc="loading", unit="B", unit_scale=True, disable=silent))
        files = {path: os.open(path, os.O_RDONLY) for path in folder.weight_files}
        for file in files.values():
            stack.callback(os.close, file)
        pool = stack.enter_context(ThreadPoolExecutor(_num_threads(), thread_name_prefix="load"))
        staging = _ThreadStaging(device)
        futures = [
            pool.submit(_load_tensor, _open_reader(name, folder, files), part, staging) for name, part in wanted.items()
        ]
        for name, future in zip(wanted, futures, strict=True):
            future.add_done_callback(lambda _, size=folder.tensors[name].num_bytes: bar.update(size))  # type: ignore[misc]
        _finish(futures)
        staging.synchronize()
    return LoadReport(num_bytes, time.monotonic() - started)


def fill_dummy_weights(sources: Iterable[WeightSource]) -> None:
    """Random weights, the same ones for every number of ranks: normal with standard deviation 0.02, norms around 1."""
    for source in sources:
        device = source.target.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(source.name.encode()))
        values = torch.empty(source.full_shape, dtype=source.target.dtype, device=device)
        values.normal_(0.0, DUMMY_STD, generator=generator)
        if source.name.endswith("norm.weight"):
            values += 1.0 - source.offset
        start, stop = _own_rows(source)
        if start < stop:
            source.target.copy_(values[start:stop] if source.dim == 0 else values[:, start:stop]).add_(source.offset)


class Staging:
    """One thread's way to the device: two host buffers, of which one is filled while the other is being copied."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def take(self, num_bytes: int) -> Tensor:
        """A buffer that nothing reads any more, [at least num_bytes] u8 cpu."""
        self._turn ^= 1
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
        if len(self._buffers[self._turn]) < num_bytes:  # rows that cannot be read apart
            self._buffers[self._turn] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._buffers[self._turn]

    def store(self, target: Tensor, values: Tensor) -> None:
        """Copy `values`, which may lie in the buffer taken last, to `target`, converting on the target's device."""
        if self.stream is None:
            target.copy_(values)
            return
        with torch.cuda.stream(self.stream):
            if values.dtype != target.dtype:
                values = values.to(self._device, non_blocking=True)
            target.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._events[self._turn] = event

    def add(self, target: Tensor, offset: float) -> None:
        """Add to a target, after what was stored there before."""
        if self.stream is None:
            target.add_(offset)
            return
        with torch.cuda.stream(self.stream):
            target.add_(offset)


class _ThreadStaging:
    """The staging of the thread that asks."""

    def __init__(self, device: torch.device):
        self._device = device
        self._local = threading.local()
        self._made: list[Staging] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what clears the targets is on another stream

    def get(self) -> Staging:
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging(self._device)
            self._made.append(self._local.staging)
        staging: Staging = self._local.staging
        return staging

    def synchronize(self) -> None:
        """Wait until all is stored."""
        for staging in self._made:
            if staging.stream is not None:
                staging.stream.synchronize()


def _load_tensor(reader: Reader, sources: list[WeightSource], threads: _ThreadStaging) -> None:
    staging = threads.get()
    with torch.inference_mode():
        for source in sources:
            start, stop = _own_rows(source)
            if start >= stop:
                continue
            if source.dim == 0:
                _load_rows(reader, source.target, start, stop, staging)
            else:
                for first, last in _chunks(reader, 0, source.full_shape[0]):
                    buffer = staging.take((last - first) * reader.row_bytes)
                    values = reader.read_columns(range(first, last), range(start, stop), buffer)
                    staging.store(source.target[first:last], values)
            if source.offset:
                staging.add(source.target, source.offset)


def _load_rows(reader: Reader, target: Tensor, start: int, stop: int, staging: Staging) -> None:
    """Rows start to stop into the first rows of `target`: at once if they need no conversion, else by buffers."""
    own = target[: stop - start]
    if isinstance(reader, SafetensorsReader) and not own.is_cuda and own.dtype == reader.dtype and own.is_contiguous():
        reader.read_into(start, own.view(-1).view(torch.uint8))
        return
    for first, last in _chunks(reader, start, stop):
        rows = reader.read(first, last, staging.take((last - first) * reader.row_bytes))
        staging.store(own[first - start : last - start], rows)


def _chunks(reader: Reader, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut rows start to stop so that each part fits a buffer, at multiples of the rows that belong together."""
    unit = reader.row_unit
    step = max(unit, BUFFER_BYTES // max(1, reader.peak_row_bytes) // unit * unit)
    for first in range(start, stop, step):
        yield first, min(stop, first + step)


def _own_rows(source: WeightSource) -> tuple[int, int]:
    """(first, end) of the rows or columns that the source takes."""
    stop = source.full_shape[source.dim] if source.length is None else source.start + source.length
    return source.start, stop


def _open_reader(name: str, folder: ModelFolder, files: dict[Path, int]) -> Reader:
    tensor = folder.tensors[name]
    if not isinstance(tensor, GgufTensor):
        return SafetensorsReader(tensor, files[tensor.file])
    return GgufReader(tensor, files[folder.path], folder.path, _rotary_head_dim(name, folder.config))


def _rotary_head_dim(name: str, config: ModelConfig) -> int | None:
    """The head size where a GGUF file has the rows of q and k in another order, for rotating neighbours."""
    is_permuted = FAMILIES[config.architecture].gguf_permuted and (".q_proj." in name or ".k_proj." in name)
    return config.head_dim if is_permuted else None


def _num_threads() -> int:
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))


def _finish(futures: list[Future[None]]) -> None:
    """Wait for all, or for the first error, which is raised when those that run have ended."""
    done, rest = wait(futures, return_when=FIRST_EXCEPTION)
    for future in rest:
        future.cancel()
    for future in done:
        future.result()
