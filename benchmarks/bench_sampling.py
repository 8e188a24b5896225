#!/usr/bin/env python3
"""Cost of each sampling option: the sampler alone, with all rows of a batch asking for the same.

    python benchmarks/bench_sampling.py                                    # 256 rows of 151,936 bf16 logits on a GPU
    python benchmarks/bench_sampling.py --device cpu --rows 8 --vocab 5000

"step" is the time from one step's logits to its tokens with steps back to back, the median of several runs, on a GPU by
CUDA events; "launch" is how long the host took to launch one, which is the part of "step" on a CPU. The plain rule runs
for every row, outside a graph. Prints a markdown table, then one JSON line.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from machine import describe_commit, describe_machine
from minisgl.protocol import Admit, Sampling, Step
from minisgl_worker.batch import SlotState
from minisgl_worker.sampler import Sampler

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, b"", b"", b"", None)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8)
STOP_IDS = np.arange(8, dtype="<i4").tobytes()
BIAS_IDS, BIAS_VALUES = np.arange(300, dtype="<i4").tobytes(), np.full(300, 2.0, "<f4").tobytes()
OPTIONS = {
    "greedy": GREEDY,
    "temperature": DRAWN,
    "top_k=50": dataclasses.replace(DRAWN, top_k=50),
    "top_p=0.9": dataclasses.replace(DRAWN, top_p=0.9),
    "top_k=50, top_p=0.9": dataclasses.replace(DRAWN, top_k=50, top_p=0.9),
    "min_p=0.05": dataclasses.replace(DRAWN, min_p=0.05),
    "repetition_penalty": dataclasses.replace(DRAWN, repetition_penalty=1.1),
    "frequency and presence": dataclasses.replace(DRAWN, frequency_penalty=0.2, presence_penalty=0.3),
    "logit_bias, 300 ids": dataclasses.replace(DRAWN, bias_ids=BIAS_IDS, bias_values=BIAS_VALUES),
    "min_tokens": dataclasses.replace(DRAWN, min_tokens=2**30, stop_ids=STOP_IDS),
    "logprobs=0": dataclasses.replace(DRAWN, num_logprobs=0),
    "logprobs=20": dataclasses.replace(DRAWN, num_logprobs=20),
}


def make_sampler(sampling: Sampling, num_rows: int, vocab: int, device: torch.device, num_with: int) -> Sampler:
    """A sampler whose first `num_with` rows ask for `sampling` and the others for its temperature alone."""
    plain = dataclasses.replace(GREEDY, temperature=sampling.temperature)
    prompts = np.random.default_rng(0).integers(0, vocab, (num_rows, 512)).astype("<i4")
    page = np.zeros(1, "<i4").tobytes()
    admits = tuple(
        Admit(row, prompt.tobytes(), len(prompt), 0, page, row, sampling if row < num_with else plain)
        for row, prompt in enumerate(prompts)
    )
    slots = SlotState(num_rows, 1, device)
    slots.apply(Step(0, admits, b"", None, False, b""))
    sampler = Sampler(slots, vocab, device)
    for row in range(num_rows):
        sampler.admit(row)
    return sampler


def make_step(sampler: Sampler, logits: torch.Tensor) -> Callable[[int], None]:
    rows = np.arange(len(logits))

    def step(number: int) -> None:
        positions = np.full(len(rows), 512 + number)
        draw = sampler.draw(logits, rows, positions)
        if sampler.has_extras(rows):
            sampler.apply_extras(logits, draw.tokens, draw.failed, rows, positions)

    return step


def time_steps(step: Callable[[int], None], device: torch.device, steps: int, runs: int) -> tuple[float, float]:
    """Microseconds per step, and of them those the host took to launch it: medians of `runs` runs of `steps`."""
    for number in range(3):
        step(number)
    times, launches = [], []
    for run in range(runs):
        if device.type == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        for number in range(steps):
            step(3 + run * steps + number)
        launched = time.perf_counter() - started
        if device.type == "cuda":
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / steps)
        else:
            times.append(launched * 1e6 / steps)
        launches.append(launched * 1e6 / steps)
    return median(times), median(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--with-option", type=int, help="rows that ask for the option (default: all)")
    parser.add_argument("--steps", type=int, default=20, help="steps per run")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    num_with = args.rows if args.with_option is None else args.with_option
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(args.rows, args.vocab, device=device, generator=generator).mul_(3).to(torch.bfloat16)
    print(f"{num_with} of {args.rows} rows with the option, {args.vocab:,} bf16 logits each\n")
    print("| option | step, us | launch, us | above the plain rule, us |\n|---|---|---|---|")
    results = {}
    for name, sampling in OPTIONS.items():
        step = make_step(make_sampler(sampling, args.rows, args.vocab, device, num_with), logits)
        total, launch = time_steps(step, device, args.steps, args.runs)
        results[name] = {"step_us": round(total, 1), "launch_us": round(launch, 1)}
        extra = f"{total - results['temperature']['step_us']:,.0f}" if "temperature" in results else "-"
        print(f"| {name} | {total:,.0f} | {launch:,.0f} | {'-' if name == 'temperature' else extra} |", flush=True)
    record = {"commit": describe_commit(), "machine": describe_machine(), "rows": args.rows, "vocab": args.vocab}
    print("\n" + json.dumps(record | {"rows_with_option": num_with, "device": args.device, "options": results}))


if __name__ == "__main__":
    main()
