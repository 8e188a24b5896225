#!/usr/bin/env python3
"""Time of one mixture-of-experts layer on a GPU beside the time that reading its chosen experts takes.

    python benchmarks/bench_moe.py FOLDER --tokens 1 8 64 256 4096       FOLDER has the config.json

Weights and inputs are random, so tokens choose nearly evenly. Each call uses other weights than the one before it, as
the layers of a model do: nothing is served from the device's cache that a model would have to read.
"""

import argparse
import json

import torch

from minisgl.model_folder import resolve_model
from minisgl_worker.layers import Place
from minisgl_worker.moe import SparseMLP
from minisgl_worker.parallel import ParallelGroup

NUM_LAYERS = 4
NUM_RUNS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 4096, 16384])
    parser.add_argument("--bandwidth", type=float, default=4300, help="GB/s (default: one H200)")
    parser.add_argument("--matmul", type=float, default=790, help="TFLOP/s (default: one H200, bf16)")
    parser.add_argument("--backend", default="triton")
    args = parser.parse_args()
    config = resolve_model(args.model, need_weights=False).config
    place = Place(ParallelGroup(0, 1), torch.bfloat16, torch.device("cuda"), args.backend)
    torch.manual_seed(0)
    layers = [SparseMLP(config, place) for _ in range(NUM_LAYERS)]
    for layer in layers:
        for weight in (layer.gate, layer.gate_up, layer.down):
            weight.normal_(0, 0.02)
    results = {}
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        chosen = torch.topk(x.float() @ layers[0].gate.float().T, config.moe.num_experts_per_token).indices.unique()
        per_expert = 3 * config.moe.intermediate_size * config.hidden_size
        read_us = len(chosen) * per_expert * 2 / args.bandwidth / 1e3
        flop_us = 2 * num_tokens * config.moe.num_experts_per_token * per_expert / args.matmul / 1e6
        results[num_tokens] = time_us(layers, x, use_graph=args.backend == "triton")
        print(f"{num_tokens:6} tokens, {len(chosen):4} experts: {results[num_tokens]:8.1f} us; "
              f"reading {read_us:.1f}, multiplying {flop_us:.1f}", flush=True)  # fmt: skip
    print(json.dumps({"benchmark": "moe", "model": args.model, "backend": args.backend, "us": results}))


def time_us(layers: list[SparseMLP], x: torch.Tensor, *, use_graph: bool) -> float:
    """Microseconds of one layer, the mean over many; as a graph where the backend can be captured."""

    def work() -> None:
        for layer in layers:
            layer(x)

    work()
    torch.cuda.synchronize()
    if use_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_RUNS):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / NUM_RUNS / len(layers) * 1e3


if __name__ == "__main__":
    main()
