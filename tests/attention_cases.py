"""Batches for tests of attention backends, and what the plain twins of the kernels say of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_worker.attention.base import AttentionBackend, AttentionSetup, ForwardBatch, HostRows, PrefillRow
from minisgl_worker.kernels.decode_attention import decode_attention_reference
from minisgl_worker.kernels.prefill_attention import prefill_attention_reference
from minisgl_worker.kv_cache import KVCache

MAX_ROW_ERROR = 0.01  # relative, in the norm of one token's output: several roundings to bf16


class Requests:
    """Requests of given lengths in shuffled pages of a cache; memory that no token owns is NaN.

    Attributes:
        table: [num_requests + 1, width] i32 host. A row of it goes on past its own pages with a page that is all NaN;
            the last row is the dummy slot's.
    """

    def __init__(self, setup: AttentionSetup, lengths: Sequence[int], width: int | None = None):
        page_size = setup.page_size
        num_pages = [-(-length // page_size) for length in lengths]
        self.setup, self.lengths = setup, np.array(lengths, np.int64)
        self.kv = KVCache(
            len(setup.layer_windows), sum(num_pages) + 2, page_size, setup.num_kv_heads, setup.head_dim, setup.dtype,
            setup.device,
        )  # fmt: skip
        order = torch.randperm(self.kv.num_pages, device="cpu").to(torch.int32).numpy()
        self.table = np.full((len(lengths) + 1, width or max(num_pages)), order[-1], np.int32)
        self.table[-1, 0] = self.kv.dummy_page
        first, locations = 0, [np.array([self.kv.dummy_page * page_size])]
        for row, (length, count) in enumerate(zip(lengths, num_pages, strict=True)):
            self.table[row, :count] = order[first : first + count]
            first += count
            positions = np.arange(length)
            locations.append(
                self.table[row, positions // page_size].astype(np.int64) * page_size + positions % page_size
            )
        where = torch.from_numpy(np.concatenate(locations)).to(setup.device)
        for store in (*self.kv.k, *self.kv.v):
            store.fill_(torch.nan)
            shape = (len(where), setup.num_kv_heads, setup.head_dim)
            store.view(-1, *shape[1:])[where] = torch.randn(shape, dtype=setup.dtype, device=setup.device)

    def host_rows(self, slots: Sequence[int], lengths: Sequence[int] | None = None) -> HostRows:
        """Decode rows of some requests, in their full length or less; slot -1 is the dummy slot."""
        where = np.array(slots, np.int64) % len(self.table)
        full = np.append(self.lengths, 1)[where]
        return HostRows(full if lengths is None else np.array(lengths, np.int64), self.table, where)

    def batch(self, decode: Sequence[int], prefills: Sequence[tuple[int, int]]) -> ForwardBatch:
        """An eager step: some requests as decode rows, then the last `count` tokens of others as prefill rows.

        Args:
            prefills: (request, count).
        """
        host, device = self.host_rows(decode), self.setup.device
        width = int(-(-host.seq_lens.max(initial=1) // self.setup.page_size))
        rows, first_row = [], len(decode)
        for request, count in prefills:
            length = int(self.lengths[request])
            pages = self.table[request, : -(-length // self.setup.page_size)].copy()
            rows.append(PrefillRow(first_row, count, length - count, torch.from_numpy(pages)))
            first_row += count
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return ForwardBatch(
            self.kv, none, none, len(decode), torch.from_numpy(self.table[host.slots, :width]).to(device),
            torch.from_numpy(host.seq_lens.astype(np.int32)).to(device), None, tuple(rows), none, host,
        )  # fmt: skip


@dataclass(frozen=True)
class RowErrors:
    """Relative error of each token's output; NaN where there is one."""

    values: Tensor

    def check(self, what: str) -> None:
        worst = self.values.nan_to_num(torch.inf, torch.inf)
        bad = (worst > MAX_ROW_ERROR).nonzero().flatten().tolist()
        assert not bad, f"{what}: {len(bad)} of {len(worst)} rows are wrong, {worst[bad[:8]].tolist()} at {bad[:8]}"


def compare(got: Tensor, want: Tensor) -> RowErrors:
    """[num_tokens, num_heads, head_dim] each."""
    assert got.shape == want.shape and got.dtype == want.dtype
    norm = want.double().flatten(1).norm(dim=1)
    return RowErrors((got.double() - want.double()).flatten(1).norm(dim=1) / norm.clamp(min=1e-30))


def expect_decode(query: Tensor, kv: KVCache, rows: HostRows, layer: int, setup: AttentionSetup) -> Tensor:
    table = torch.from_numpy(rows.page_table[rows.slots]).to(query.device)
    lengths = torch.from_numpy(rows.seq_lens.astype(np.int32)).to(query.device)
    scale, window = setup.scale, setup.layer_windows[layer]
    return decode_attention_reference(query, *kv.layer(layer), table, lengths, scale, window=window)


def expect_prefill(query: Tensor, kv: KVCache, row: PrefillRow, layer: int, setup: AttentionSetup) -> Tensor:
    scale, window = setup.scale, setup.layer_windows[layer]
    pages = row.page_ids.to(query.device)
    return prefill_attention_reference(query, *kv.layer(layer), pages, row.first_position, scale, window=window)


def check_eager(backend: AttentionBackend, requests: Requests, batch: ForwardBatch) -> None:
    """Plan a batch once, then compare the outputs of all layers with the plain twins."""
    setup, host = requests.setup, batch.host
    num_tokens = batch.num_decode + sum(row.num_tokens for row in batch.prefills)
    backend.plan(batch)
    for layer in range(len(setup.layer_windows)):
        query = torch.randn(num_tokens, setup.num_heads, setup.head_dim, dtype=setup.dtype, device=setup.device)
        got = backend.attend(query, layer, batch)
        if batch.num_decode:
            part = slice(batch.num_decode)
            compare(got[part], expect_decode(query[part], batch.kv, host, layer, setup)).check(f"layer {layer}, decode")
        for row in batch.prefills:
            part = slice(row.first_row, row.first_row + row.num_tokens)
            errors = compare(got[part], expect_prefill(query[part], batch.kv, row, layer, setup))
            errors.check(f"layer {layer}, prefill of {row.num_tokens} tokens from {row.first_position}")


class DecodeGraph:
    """The attention of all layers for a fixed number of decode rows, captured as the worker does it.

    Without a GPU the captured code simply runs again at each replay.
    """

    def __init__(self, backend: AttentionBackend, requests: Requests, num_rows: int):
        setup = self._setup = requests.setup
        self._backend, self._requests = backend, requests
        self._table = torch.from_numpy(requests.table).to(setup.device)
        self._seq_lens = torch.ones(len(requests.table), dtype=torch.int32, device=setup.device)
        self._slots = torch.full((num_rows,), len(requests.table) - 1, dtype=torch.int32, device=setup.device)
        self._query = torch.randn(num_rows, setup.num_heads, setup.head_dim, dtype=setup.dtype, device=setup.device)
        self._outs: list[Tensor] = []
        self._graph = None
        if setup.device.type != "cuda":
            return
        dummies = requests.host_rows([-1] * num_rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            backend.plan_replay(dummies)
            self._attend()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._attend()

    def replay(self, rows: HostRows, query: Tensor) -> list[Tensor]:
        """The outputs of all layers for one query; nothing here waits for the device."""
        slots = _to_device(rows.slots, self._setup.device)
        self._seq_lens[slots] = _to_device(rows.seq_lens, self._setup.device)
        self._slots.copy_(slots)
        self._query.copy_(query)
        self._backend.plan_replay(rows)
        if self._graph is None:
            self._attend()
        else:
            self._graph.replay()
        return [out.clone() for out in self._outs]

    def _attend(self) -> None:
        none = torch.zeros(0, dtype=torch.int64, device=self._setup.device)
        batch = ForwardBatch(
            self._requests.kv, none, none, len(self._slots), self._table, self._seq_lens, self._slots, (), None
        )
        self._backend.plan(batch)
        layers = range(len(self._setup.layer_windows))
        self._outs = [self._backend.attend(self._query, layer, batch) for layer in layers]


def check_replays(backend: AttentionBackend, requests: Requests, steps: Sequence[HostRows], delay: int = 0) -> None:
    """Replay one graph for steps of equal size, without the host waiting in between, and compare all outcomes.

    Args:
        delay: cycles for which the device is kept busy first, so that the host plans all steps ahead of it.
    """
    setup, num_rows = requests.setup, len(steps[0].slots)
    graph = DecodeGraph(backend, requests, num_rows)
    shape = (len(steps), num_rows, setup.num_heads, setup.head_dim)
    queries = torch.randn(shape, dtype=setup.dtype, device=setup.device)
    if setup.device.type == "cuda" and delay:
        torch.cuda._sleep(delay)
    outcomes = [graph.replay(rows, query) for rows, query in zip(steps, queries, strict=True)]
    for step, (rows, query, outs) in enumerate(zip(steps, queries, outcomes, strict=True)):
        for layer, got in enumerate(outs):
            errors = compare(got, expect_decode(query, requests.kv, rows, layer, setup))
            errors.check(f"replay {step}, layer {layer}")


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array.astype(np.int32))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
