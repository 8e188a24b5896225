#!/usr/bin/env python3
"""Time of the worker's kernels on one GPU, against what reading their inputs alone would take.

    python benchmarks/bench_kernels.py --sections decode,prefill,linear,small,layer

Kernels are timed inside a CUDA graph of many launches, with inputs that are not in the cache. Each section prints its
lines as it goes; the last line of the output is one JSON object. Times are microseconds.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from machine import describe_commit, describe_machine
from minisgl_worker.kernels.activation import silu_mul
from minisgl_worker.kernels.decode_attention_triton import DecodeConfig, DecodePlan, choose_config, decode_attention
from minisgl_worker.kernels.linear import linear
from minisgl_worker.kernels.norm import add_rms_norm
from minisgl_worker.kernels.prefill_attention_triton import plan_prefill, prefill_attention
from minisgl_worker.kernels.rope_append import qk_norm_rope_append
from minisgl_worker.kernels.sampling import sample
from workload import HEADLINE

READ_GB_PER_S = 4400.0  # measured on H200, reads alone
FLOP_PER_S = 790e12
NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 8, 128, 151_936
SCALE = HEAD_DIM**-0.5
MODELS = {"0.6B": (1024, 16, 3072), "14B": (5120, 40, 17408)}  # hidden size, heads, intermediate size of Qwen3
DECODE_CONFIGS = (
    DecodeConfig(32, 2, 4, 4), DecodeConfig(32, 4, 4, 4), DecodeConfig(32, 4, 3, 5), DecodeConfig(64, 4, 3, 3),
    DecodeConfig(16, 2, 4, 6), DecodeConfig(32, 2, 4, 4, 4), DecodeConfig(32, 2, 4, 4, 1),
)  # fmt: skip

Call = Callable[[], Any]
Results = dict[str, Any]


def time_calls(calls: Sequence[Call], replays: int = 5) -> float:
    """Microseconds per call, the median of replays of one graph that holds them all."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[replays // 2] * 1e3 / len(calls)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(scale)


def headline_lengths(step: int) -> list[int]:
    """Lengths of the rows that still run at a step of the headline workload."""
    prompts, outputs = HEADLINE.draw_lengths()
    return [p + step for p, o in zip(prompts, outputs, strict=True) if o >= step]


SCENARIOS = {
    **{f"step {step}": headline_lengths(step) for step in (1, 250, 500, 900, 1020)},
    "one row of 1k": [1024],
    "one row of 32k among 255": [32_768] + [300 + 2 * i for i in range(255)],
    "256 rows of 16..55": [16 + i % 40 for i in range(256)],
}


class PagedRows:
    """KV caches of several layers, larger than the L2 cache together, and tables of rows in shuffled pages."""

    def __init__(self, lengths: Sequence[int], page_size: int, num_layers: int, pool_tokens: int = 200_000):
        num_pages = pool_tokens // page_size
        self.page_size = page_size
        self.caches = [
            (random(num_pages, page_size, NUM_KV_HEADS, HEAD_DIM), random(num_pages, page_size, NUM_KV_HEADS, HEAD_DIM))
            for _ in range(num_layers)
        ]
        self.place(lengths, 1)

    def place(self, lengths: Sequence[int], num_tables: int) -> None:
        """New rows; several tables, so that launches over the same cache read different pages."""
        width = -(-max(lengths) // self.page_size)
        needed = [-(-length // self.page_size) for length in lengths]
        self.tables = []
        for _ in range(num_tables):
            order = torch.randperm(len(self.caches[0][0]))
            table = torch.zeros(len(lengths), width, dtype=torch.int32)
            for row, (end, count) in enumerate(zip(itertools.accumulate(needed), needed, strict=True)):
                table[row, :count] = order[end - count : end]
            self.tables.append(table.cuda())
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")


def bench_decode(results: Results, page_sizes: Sequence[int]) -> None:
    """Decode attention: the default configuration, and the best of some others."""
    for page_size in page_sizes:
        rows = PagedRows([1], page_size, 6)
        for num_heads, (name, lengths) in itertools.product((16, 40), SCENARIOS.items()):
            num_calls = 12 if len(lengths) > 100 else 24
            rows.place(lengths, 2 if len(lengths) > 100 else num_calls)
            kv_bytes = sum(lengths) * NUM_KV_HEADS * HEAD_DIM * 2 * 2
            times = {}
            for config in DECODE_CONFIGS:
                times[config] = time_decode(rows, num_heads, config, num_calls)
            best = min(times, key=lambda config: times[config])
            default_us = times[choose_config(num_heads // NUM_KV_HEADS)]
            text = " ".join(f"{us:.1f}" for us in times.values())
            print(
                f"decode page {page_size} ({num_heads},8) {name:25} {len(lengths):3} rows: {default_us:6.1f} us "
                f"{kv_bytes / default_us / 1e3:5.0f} GB/s {kv_bytes / default_us / 10 / READ_GB_PER_S:3.0f}% | {text} "
                f"| best {best.tile_tokens},{best.num_warps},{best.num_stages},{best.programs_per_sm}",
                flush=True,
            )
            results[f"decode page {page_size} heads {num_heads} {name}"] = list(times.values())


def time_decode(rows: PagedRows, num_heads: int, config: DecodeConfig, num_calls: int) -> float:
    plan = DecodePlan(256, num_heads, NUM_KV_HEADS, HEAD_DIM, torch.device("cuda", 0), None, config)
    plan.build(rows.lengths, len(rows.lengths))
    query = random(len(rows.lengths), num_heads, HEAD_DIM)
    out = torch.empty_like(query)

    def call(i: int) -> None:
        cache, table = rows.caches[i % len(rows.caches)], rows.tables[i % len(rows.tables)]
        decode_attention(query, *cache, table, rows.lengths, SCALE, plan, out, plan_is_old=True)

    torch.cuda.synchronize()
    return time_calls([lambda i=i: call(i) for i in range(num_calls)])


def bench_prefill(results: Results) -> None:
    for num_heads, (count, length) in itertools.product((16, 40), ((32, 512), (4, 4096))):
        rows = PagedRows([length] * count, 16, 1, count * length)
        query = random(count * length, num_heads, HEAD_DIM)
        out = torch.empty_like(query)
        tiles = plan_prefill([(i * length, length, 0) for i in range(count)]).cuda()
        arguments = (query, *rows.caches[0], rows.tables[0], tiles, SCALE, out)
        us = time_calls([lambda arguments=arguments: prefill_attention(*arguments)] * 4)
        tflop = 2 * num_heads * HEAD_DIM * length * length * count / 1e12
        print(f"prefill {count}x{length} ({num_heads},8): {us:.0f} us, {tflop / us * 1e6:.0f} TFLOP/s", flush=True)
        results[f"prefill {count}x{length} heads {num_heads}"] = us


def weight_shapes(model: str) -> dict[str, tuple[int, int]]:
    hidden, num_heads, intermediate = MODELS[model]
    width = num_heads * HEAD_DIM
    qkv = (width + 2 * NUM_KV_HEADS * HEAD_DIM, hidden)
    return {"qkv": qkv, "o": (hidden, width), "gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate)}


def bench_linear(results: Results) -> None:
    """`linear` of few rows against the vendor's library, cold weights."""
    for model in MODELS:
        hidden = MODELS[model][0]
        for name, (num_outputs, width) in {**weight_shapes(model), "head": (VOCAB_SIZE, hidden)}.items():
            weight_bytes = num_outputs * width * 2
            copies = max(2, min(24, int(3e8 / weight_bytes) + 1))
            weights = [random(num_outputs, width, scale=0.02) for _ in range(copies)]
            line = []
            for num_rows in (1, 2, 4, 8, 16):
                x = random(num_rows, width)
                ours, library = (
                    time_calls([lambda x=x, w=w, f=f: f(x, w) for w in weights]) for f in (linear, F.linear)
                )
                line.append(f"M={num_rows} {ours:.2f} / {library:.2f}")
                results[f"linear {model} {name} rows {num_rows}"] = (ours, library)
            print(f"linear {model} {name:7} read {weight_bytes / READ_GB_PER_S / 1e3:.1f}; ours / library: ", *line,
                  flush=True)  # fmt: skip


def bench_small(results: Results) -> None:
    """The elementwise kernels of a decode step, and sampling."""
    for (model, (hidden, num_heads, intermediate)), num_rows in itertools.product(MODELS.items(), (256, 1)):
        x, residual, weight = random(num_rows, hidden), random(num_rows, hidden), random(hidden)
        gate_up, qkv = random(num_rows, 2 * intermediate), random(num_rows, (num_heads + 16) * HEAD_DIM)
        rows = PagedRows([1], 16, 1, 16_000)
        table = torch.randn(4096, HEAD_DIM, device="cuda")
        positions = torch.randint(0, 4096, (num_rows,), device="cuda")
        locations = torch.randperm(16_000, device="cuda")[:num_rows]
        head_weight = random(HEAD_DIM)
        rope = (qkv, head_weight, head_weight, 1e-6, table, positions, *rows.caches[0], locations)
        calls: dict[str, Call] = {
            "add_rms_norm": lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6),
            "silu_mul": lambda g=gate_up: silu_mul(g),
            "rope_append": lambda arguments=rope: qk_norm_rope_append(*arguments),
        }
        times = {name: time_calls([call] * 20) for name, call in calls.items()}
        results[f"small {model} rows {num_rows}"] = times
        print(f"small {model} {num_rows} rows:", *(f"{k} {v:.2f}" for k, v in times.items()), flush=True)
    for num_rows in (256, 128, 36, 1):
        logits = [random(num_rows, VOCAB_SIZE, scale=2.0) for _ in range(3)]
        seeds = torch.randint(-(2**62), 2**62, (num_rows,), device="cuda")
        positions = torch.arange(num_rows, device="cuda")
        times = {}
        for temperature in (0.0, 0.6):
            t = torch.full((num_rows,), temperature, device="cuda")
            calls = [lambda x=x, t=t, s=seeds, p=positions: sample(x, t, s, p) for x in logits * 3]
            times[f"temperature {temperature}"] = time_calls(calls)
        times["read"] = num_rows * VOCAB_SIZE * 2 / READ_GB_PER_S / 1e3
        results[f"sample rows {num_rows}"] = times
        print(f"sample {num_rows} rows:", *(f"{k} {v:.1f}" for k, v in times.items()), flush=True)


class DecodeLayers:
    """The kernels of some decoder layers for one decode step, in the order in which a model launches them."""

    def __init__(self, model: str, num_layers: int):
        self.hidden, self.num_heads, _ = MODELS[model]
        self.weights = [
            {k: random(*shape, scale=0.02) for k, shape in weight_shapes(model).items()} for _ in range(num_layers)
        ]
        self.norm, self.head_norm = random(self.hidden), random(HEAD_DIM)
        self.table = torch.randn(4096, HEAD_DIM, device="cuda")
        self.rows = PagedRows([1], 16, num_layers)
        self.plan = DecodePlan(256, self.num_heads, NUM_KV_HEADS, HEAD_DIM, torch.device("cuda", 0))

    def place(self, lengths: Sequence[int]) -> None:
        self.rows.place(lengths, 1)
        self.plan.build(self.rows.lengths, len(lengths))
        self.positions = torch.randint(0, 4096, (len(lengths),), device="cuda")
        self.locations = self.rows.tables[0][:, 0].to(torch.int64) * 16
        self.x = random(len(lengths), self.hidden)

    def run(self, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x, residual = self.x, self.x
        for weights, cache in zip(self.weights, self.rows.caches, strict=True):
            x, residual = add_rms_norm(x, residual, self.norm, 1e-6)
            query = qk_norm_rope_append(
                product(x, weights["qkv"]), self.head_norm, self.head_norm, 1e-6, self.table, self.positions, *cache,
                self.locations,
            )  # fmt: skip
            out = torch.empty_like(query)
            decode_attention(query, *cache, self.rows.tables[0], self.rows.lengths, SCALE, self.plan, out,
                             plan_is_old=True)  # fmt: skip
            x, residual = add_rms_norm(product(out.flatten(1), weights["o"]), residual, self.norm, 1e-6)
            x = product(silu_mul(product(x, weights["gate_up"])), weights["down"])
        return x


def bench_layer(results: Results) -> None:
    """A whole decoder layer, `linear` against the vendor's library, and the time of reading weights and KV alone."""
    for model, num_layers in (("0.6B", 8), ("14B", 4)):
        layers = DecodeLayers(model, num_layers)
        weight_bytes = sum(w.numel() * 2 for w in layers.weights[0].values())
        for name in ("step 1", "step 500", "step 900", "16 rows", "4 rows", "one row of 1k"):
            lengths = [1024] * int(name.split()[0]) if name.endswith(" rows") else SCENARIOS[name]
            layers.place(lengths)
            torch.cuda.synchronize()
            ours, library = (
                time_calls([lambda layers=layers, f=f: layers.run(f)]) / num_layers for f in (linear, F.linear)
            )
            kv_bytes = sum(lengths) * NUM_KV_HEADS * HEAD_DIM * 4
            flop_us = weight_bytes * len(lengths) / FLOP_PER_S * 1e6
            limit = kv_bytes / READ_GB_PER_S / 1e3 + max(weight_bytes / READ_GB_PER_S / 1e3, flop_us)
            print(f"layer {model} {name} ({len(lengths)} rows): {ours:.1f}, with the library {library:.1f}, "
                  f"limit {limit:.1f}", flush=True)  # fmt: skip
            results[f"layer {model} {name}"] = (ours, library, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="decode,prefill,linear,small,layer")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16])
    arguments = parser.parse_args()
    sections: dict[str, Callable[[Results], None]] = {
        "decode": lambda results: bench_decode(results, arguments.page_sizes),
        "prefill": bench_prefill, "linear": bench_linear, "small": bench_small, "layer": bench_layer,
    }  # fmt: skip
    results: Results = {}
    started = time.monotonic()
    with torch.inference_mode():
        for name in arguments.sections.split(","):
            sections[name](results)
            torch.cuda.empty_cache()
            print(f"[{name} done at {time.monotonic() - started:.0f} s]", flush=True)
    print(json.dumps({"bench": "kernels", "commit": describe_commit(), "machine": describe_machine(), "us": results}))


if __name__ == "__main__":
    main()
