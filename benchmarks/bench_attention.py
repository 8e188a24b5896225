#!/usr/bin/env python3
"""Time of every attention backend on one GPU, as a markdown table.

    python benchmarks/bench_attention.py --backends triton,fi,fa,trtllm --heads 16x8,40x8 --page-size 16

Decode is timed as the worker runs it: `plan_replay` on the host, then a CUDA graph with the attention of many layers,
whose KV together is larger than the GPU's cache. What a backend plans on the device, once per step, is left out. Rows
have lengths drawn uniformly from 100 to 2000 tokens. Prefill is 16 prompts of 1024 tokens in eager calls. Bandwidth is
that of reading each row's K and V once; its share is of what a plain reduction over 4 GB reaches in the same run. The
last line of the output is one JSON object.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from machine import describe_commit, describe_machine
from minisgl.errors import ModelLoadError
from minisgl_worker.attention import BACKENDS, make_backend
from minisgl_worker.attention.base import AttentionBackend, AttentionSetup, ForwardBatch, HostRows, PrefillRow
from minisgl_worker.kv_cache import KVCache

HEAD_DIM, NUM_LAYERS = 128, 16
BATCH_SIZES = (1, 8, 36, 64, 128, 256)
PROMPTS = (16, 1024)
LONG_CONTEXT = 40_960
REPEATS = 9
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Scenario:
    """Decode rows of some lengths."""

    name: str
    lengths: list[int]
    max_seq_len: int


def draw_lengths(count: int) -> list[int]:
    """One row has the mean, so that its KV of all layers does not fit the cache."""
    if count == 1:
        return [1050]
    generator = random.Random(count)
    return [generator.randint(100, 2000) for _ in range(count)]


SCENARIOS = [
    *(Scenario(f"{count}", draw_lengths(count), 2048) for count in BATCH_SIZES),
    Scenario(f"256, max_seq_len {LONG_CONTEXT}", draw_lengths(256), LONG_CONTEXT),
    Scenario("1 of 32,768 tokens and 255 short", [32_768, *(100 + i for i in range(255))], LONG_CONTEXT),
]


def median_us(events: list[torch.cuda.Event]) -> float:
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) * 1e3


def measure_read_gb_per_s() -> float:
    values = torch.zeros(2**30, dtype=torch.float32, device=DEVICE)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    values.sum()
    for event in events:
        event.record()
        values.sum()
    torch.cuda.synchronize()
    return values.nbytes / median_us(events) / 1e3


def make_host_rows(scenario: Scenario, kv: KVCache) -> HostRows:
    """Rows in shuffled pages of one pool; the dummy slot comes last."""
    page_size = kv.page_size
    order = np.random.default_rng(0).permutation(kv.num_pages).astype(np.int32)
    count = len(scenario.lengths)
    table = np.zeros((count + 1, -(-scenario.max_seq_len // page_size)), np.int32)
    first = 0
    for row, length in enumerate(scenario.lengths):
        num_pages = -(-length // page_size)
        table[row, :num_pages] = order[first : first + num_pages]
        first += num_pages
    return HostRows(np.array(scenario.lengths, np.int64), table, np.arange(count))


def bench_decode(backend: AttentionBackend, setup: AttentionSetup, kv: KVCache, rows: HostRows) -> tuple[float, float]:
    """(microseconds of one layer on the device, microseconds of the host's plan of a step)."""
    num_rows = len(rows.slots)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    lengths = torch.from_numpy(np.append(rows.seq_lens, 1).astype(np.int32)).to(DEVICE)
    table, slots = (
        torch.from_numpy(rows.page_table).to(DEVICE),
        torch.from_numpy(rows.slots.astype(np.int32)).to(DEVICE),
    )
    batch = ForwardBatch(kv, none, none, num_rows, table, lengths, slots, (), None)
    query = torch.randn(num_rows, setup.num_heads, HEAD_DIM, dtype=setup.dtype, device=DEVICE)

    def attend() -> None:
        for layer in range(NUM_LAYERS):
            backend.attend(query, layer, batch)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.plan_replay(rows)
        backend.plan(batch)
        attend()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            attend()
        backend.plan_replay(rows)
        backend.plan(batch)
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        for event in events:
            event.record()
            graph.replay()
        stream.synchronize()
        plans = []
        for _ in range(20):
            started = time.perf_counter()
            backend.plan_replay(rows)
            plans.append((time.perf_counter() - started) * 1e6)
            stream.synchronize()
    return median_us(events) / NUM_LAYERS, statistics.median(plans)


def bench_prefill(backend: AttentionBackend, setup: AttentionSetup, kv: KVCache) -> tuple[float, float]:
    """(microseconds of one layer on the device, microseconds of the host's plan), 16 whole prompts of 1024 tokens."""
    count, length = PROMPTS
    num_pages = -(-length // kv.page_size)
    pages = torch.randperm(kv.num_pages)[: count * num_pages].to(torch.int32).view(count, num_pages)
    rows = tuple(PrefillRow(i * length, length, 0, pages[i]) for i in range(count))
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    empty = torch.zeros(0, 1, dtype=torch.int32, device=DEVICE)
    batch = ForwardBatch(kv, none, none, 0, empty, empty[:, 0], None, rows, none)
    query = torch.randn(count * length, setup.num_heads, HEAD_DIM, dtype=setup.dtype, device=DEVICE)
    events, plans = [], []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        backend.plan(batch)
        plans.append((time.perf_counter() - started) * 1e6)
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        backend.attend(query, 0, batch)
        pair[0].record()
        for layer in range(NUM_LAYERS):
            backend.attend(query, layer, batch)
        pair[1].record()
        events.append(pair)
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 / NUM_LAYERS for a, b in events[2:]]
    return statistics.median(times), statistics.median(plans)


class Heads:
    """All measurements of one pair of head counts, over one pool of pages."""

    def __init__(self, num_heads: int, num_kv_heads: int, page_size: int, names: list[str]):
        self._num_heads, self._num_kv_heads, self._page_size, self._names = num_heads, num_kv_heads, page_size, names
        most = max(sum(-(-length // page_size) for length in scenario.lengths) for scenario in SCENARIOS)
        self._pool = KVCache(NUM_LAYERS, most, page_size, num_kv_heads, HEAD_DIM, torch.bfloat16, DEVICE)
        for store in (*self._pool.k, *self._pool.v):
            store.normal_()
        self._made: dict[tuple[str, int], AttentionBackend | None] = {}
        self.results: list[dict[str, object]] = []

    def bench_decode(self, read: float) -> None:
        title = f"{self._num_heads} query and {self._num_kv_heads} KV heads, page {self._page_size}: decode rows"
        print(
            f"\n| {title} | backend | us per layer | GB/s | of reading | host's plan, us |\n|---|---|---|---|---|---|"
        )
        for scenario, name in itertools.product(SCENARIOS, self._names):
            setup, backend = self._make(name, scenario.max_seq_len)
            if backend is None:
                continue
            us, plan_us = bench_decode(backend, setup, self._pool, make_host_rows(scenario, self._pool))
            rate = sum(scenario.lengths) * self._num_kv_heads * HEAD_DIM * 2 * 2 / us / 1e3
            print(
                f"| {scenario.name} | {name} | {us:.1f} | {rate:,.0f} | {rate / read:.0%} | {plan_us:.0f} |", flush=True
            )
            self._keep(scenario.name, name, us=us, gb_per_s=rate, plan_us=plan_us)

    def bench_prefill(self) -> None:
        count, length = PROMPTS
        tflop = 2 * self._num_heads * HEAD_DIM * length * length * count / 1e12
        print(f"\n| prefill, {count} x {length} tokens | us per layer | TFLOP/s | host's plan, us |\n|---|---|---|---|")
        for name in self._names:
            setup, backend = self._make(name, SCENARIOS[0].max_seq_len)
            if backend is None:
                continue
            us, plan_us = bench_prefill(backend, setup, self._pool)
            print(f"| {name} | {us:.0f} | {tflop / us * 1e6:.0f} | {plan_us:.0f} |", flush=True)
            self._keep(f"prefill {count}x{length}", name, us=us, tflop_per_s=tflop / us * 1e6, plan_us=plan_us)

    def _make(self, name: str, max_seq_len: int) -> tuple[AttentionSetup, AttentionBackend | None]:
        """The backend is None where this machine lacks something, which is told."""
        setup = AttentionSetup(
            self._num_heads, self._num_kv_heads, HEAD_DIM, (None,) * NUM_LAYERS, torch.bfloat16, self._page_size, 256,
            max_seq_len, DEVICE,
        )  # fmt: skip
        if (name, max_seq_len) not in self._made:
            try:
                self._made[name, max_seq_len] = make_backend((name, name), setup)[1]
            except ModelLoadError as error:
                print(f"left out: {error}", file=sys.stderr)
                self._made[name, max_seq_len] = None
        return setup, self._made[name, max_seq_len]

    def _keep(self, rows: str, name: str, **numbers: float) -> None:
        heads = [self._num_heads, self._num_kv_heads]
        self.results.append({"heads": heads, "page_size": self._page_size, "rows": rows, "backend": name, **numbers})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu_names = [name for name in BACKENDS if name != "torch"]
    parser.add_argument("--backends", default=",".join(gpu_names), help="names, with commas between them")
    parser.add_argument("--heads", default="16x8,40x8", help="query heads x KV heads, with commas between pairs")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    read = measure_read_gb_per_s()
    print(f"reading 4 GB: {read:,.0f} GB/s")
    results: list[dict[str, object]] = []
    for pair in arguments.heads.split(","):
        num_heads, num_kv_heads = (int(number) for number in pair.split("x"))
        heads = Heads(num_heads, num_kv_heads, arguments.page_size, arguments.backends.split(","))
        heads.bench_decode(read)
        heads.bench_prefill()
        results += heads.results
        del heads  # its memory, before the next pair's
    record = {"commit": describe_commit(), "machine": describe_machine(), "read_gb_per_s": read, "results": results}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
