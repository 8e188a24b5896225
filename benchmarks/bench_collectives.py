#!/usr/bin/env python3
"""Sums over several GPUs as a decode step makes them, in a CUDA graph: NCCL against a one-shot kernel.

    python benchmarks/bench_collectives.py --num-ranks 2 --hidden-size 5120 --num-sums 80

The one-shot kernel is PyTorch's, over symmetric memory: each rank reads all the others' values and adds them itself. It
copies its input to that memory first, as a layer would have to. NVLink multicast is not used. The table is for people;
the last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from machine import describe_commit, describe_machine
from minisgl_worker.parallel import ParallelGroup, choose_device

ROWS = (1, 4, 16, 64, 256, 1024)
MAX_SYMMETRIC_BYTES = 2**24
NUM_REPLAYS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=5120)
    parser.add_argument("--num-sums", type=int, default=80, help="in one graph: two per layer")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        start_ranks(args.num_ranks)
    else:
        run_rank(args)


def start_ranks(num_ranks: int) -> None:
    """One process per rank, with this program's own arguments."""
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, *sys.argv, "--rendezvous", f"file://{folder}/rendezvous"]
        ranks = [subprocess.Popen([*common, "--rank", str(rank)]) for rank in range(num_ranks)]
        try:
            sys.exit(max(abs(rank.wait()) for rank in ranks))
        finally:
            for rank in ranks:
                rank.kill()


def run_rank(args: argparse.Namespace) -> None:
    group = ParallelGroup(args.rank, args.num_ranks)
    device = choose_device("cuda", group)
    group.join(args.rendezvous, device)
    one_shot = make_one_shot(device)
    results = []
    for rows in ROWS:
        x = torch.randn(rows, args.hidden_size, device=device).to(torch.bfloat16)
        result: dict[str, float] = {"rows": rows, "bytes": x.nbytes}
        result["nccl_us"] = measure(group.sum, x, args.num_sums)
        if one_shot is not None and x.nbytes <= MAX_SYMMETRIC_BYTES:
            result["one_shot_us"] = measure(one_shot, x, args.num_sums)
            error = (one_shot(x).float() - group.sum(x.clone()).float()).abs().max().item()
            result["difference"] = round(error, 4)
        results.append(result)
        if args.rank == 0:
            print("  ".join(f"{name} {value:g}" for name, value in result.items()), flush=True)
    group.wait_for_all(device)
    if args.rank == 0:
        print(
            json.dumps(
                {
                    "benchmark": "collectives",
                    "num_ranks": args.num_ranks,
                    "hidden_size": args.hidden_size,
                    "num_sums": args.num_sums,
                    "results": results,
                    "machine": describe_machine(),
                    "commit": describe_commit(),
                }
            )
        )
    sys.stdout.flush()
    os._exit(0)  # taking communicators down that graphs refer to may wait for ever


def make_one_shot(device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The one-shot sum, or None where this torch or machine has no symmetric memory."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        name = dist.group.WORLD.group_name
        buffer = symmetric.empty(MAX_SYMMETRIC_BYTES // 2, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(buffer, name)
    except (ImportError, RuntimeError) as error:
        print(f"no symmetric memory: {error}", file=sys.stderr)
        return None

    def one_shot(x: Tensor) -> Tensor:
        place = buffer[: x.numel()].view(x.shape)
        place.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(place, "sum", name)

    return one_shot


def measure(operation: Callable[[Tensor], Tensor], x: Tensor, num_sums: int) -> float:
    """Microseconds of one sum among `num_sums` in a row, each of the one's before; every rank measures at once."""

    def chain() -> None:
        y = x.clone()
        for _ in range(num_sums):
            y = operation(y) * 0.5  # a kernel between two sums, as in a layer; keeps the values small

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        chain()
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return round(1000 * start.elapsed_time(end) / NUM_REPLAYS / num_sums, 2)


if __name__ == "__main__":
    main()
