#!/usr/bin/env python3
"""How long a worker takes to load a checkpoint, and how much host memory it takes beside the weights' place.

    python benchmarks/bench_loading.py FOLDER --dtype bfloat16 --device cpu

Each run is a process of its own, as memory that was used before is faster to fill. After the first run, which is left
out, the files are in the system's cache. Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from machine import describe_commit, describe_machine
from minisgl.config import EngineConfig
from minisgl_worker.model_runner import ModelRunner

OPTIONS = {"num_pages": 1, "max_running_req": 1, "max_seq_len": 16}  # next to no memory but the weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or .gguf file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one run, in this process")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(load_once(args.model, args.dtype, args.device)))
        return
    runs = []
    for number in range(args.repeat + 1):
        done = subprocess.run([sys.executable, *sys.argv, "--once"], check=True, stdout=subprocess.PIPE)
        runs.append(json.loads(done.stdout))
        print(f"run {number}: {runs[-1]}", file=sys.stderr)
    seconds = [run["seconds"] for run in runs[1:]]
    num_bytes, median = runs[0]["bytes"], statistics.median(seconds)
    print(json.dumps({
        "benchmark": "loading", "commit": describe_commit(), "machine": describe_machine(), "model": args.model,
        "dtype": args.dtype, "device": args.device, "gb": round(num_bytes / 1e9, 3),
        "seconds": [round(s, 2) for s in seconds], "s_per_gb": round(median / num_bytes * 1e9, 3),
        "gb_per_s": round(num_bytes / median / 1e9, 3),
        "host_mib_beside_weights": max(run["bytes_beside_weights"] for run in runs) >> 20,
    }))  # fmt: skip


def load_once(model: str, dtype: str, device: str) -> dict[str, float]:
    """Load a model in this process, which has not loaded one before."""
    config = EngineConfig.from_options(model, {"dtype": dtype, "device": device, **OPTIONS})
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = read_status("VmRSS")
    runner = ModelRunner(config)
    report = runner.load_report
    assert report is not None
    on_host = sum(source.target.nbytes for source in runner._model.weights() if not source.target.is_cuda)
    beside = read_status("VmHWM") - before - on_host
    return {"seconds": report.seconds, "bytes": report.num_bytes, "bytes_beside_weights": beside}


def read_status(name: str) -> int:
    """A size of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
