#!/usr/bin/env python3
"""Offline throughput of `LLM.generate`, and its distance from what the machine could do at most.

    python benchmarks/bench_offline.py --model smollm2 --cpu-workload --option dtype=bfloat16
    python benchmarks/bench_offline.py --config FOLDER --headline --repeat 3
    python benchmarks/bench_offline.py --model M --num-prompts 64 --input-len 100:200 --output-len 50:50

Every repetition has fresh prompts, so that none is served from the prefix cache. The table is for people; the last line
of the output is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine import describe_commit, describe_machine
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.model_folder import resolve_model
from roofline import Limit, Rates, compute_limit
from workload import CPU, HEADLINE, Workload

NUM_FIRST_TOKEN_RUNS = 3
VALUE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def main() -> None:
    args = parse_arguments()
    workload, one_request = choose_workload(args)
    options = dict(parse_option(text) for text in args.option)
    if args.config:
        options["use_dummy_weight"] = True
    model = args.config or args.model

    start = time.perf_counter()
    with LLM(model, **options) as llm:
        ready_s = time.perf_counter() - start
        print(f"{model}: ready after {ready_s:.1f} s", flush=True)
        for number in range(args.warmup):
            generate(llm, workload, -1 - number)
        runs = measure("run", args.repeat, lambda number: generate(llm, workload, number))
        first_token_s = statistics.median(time_first_token(llm, workload, n) for n in range(NUM_FIRST_TOKEN_RUNS))
        one_runs = []
        if one_request:
            generate(llm, one_request, -1)
            one_runs = measure("one request", args.repeat, lambda number: generate(llm, one_request, number))
    result = {
        "benchmark": "offline",
        "model": str(model),
        "workload": asdict(workload),
        "options": options,
        **summarize("", workload, runs),
        "ready_s": round(ready_s, 2),
        "first_token_s": round(first_token_s, 4),
    }
    if one_request:
        result |= {"one_request": asdict(one_request)} | summarize("one_request_", one_request, one_runs)
    if not args.no_limit:
        result |= find_limits(args, model, options, workload, one_request)
    print_table(result)
    if args.breakdown:
        print_breakdown(model, options, workload)
    print(json.dumps(result | {"commit": describe_commit(), "machine": describe_machine()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder, .gguf file, smollm2 or Hub id")
    model.add_argument("--config", metavar="FOLDER", help="folder with config.json alone: random weights of that shape")
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument(
        "--headline", action="store_true", help="256 prompts and outputs of 100..1024 tokens, temperature 0.6"
    )
    preset.add_argument(
        "--cpu-workload", action="store_true", help="32 prompts of 32..256, outputs 32..128, greedy; one request"
    )
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--input-len", type=parse_range, metavar="LOW:HIGH", help="tokens per prompt")
    parser.add_argument(
        "--output-len", type=parse_range, metavar="LOW:HIGH", help="tokens per answer; stop ids are ignored"
    )
    parser.add_argument("--vocab-limit", type=int, metavar="N", help="prompt ids are below N")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int, help="of the prompts and lengths")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measured repetitions (3)")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="repetitions before the first measured one (1)"
    )
    parser.add_argument(
        "--one-request",
        type=parse_range,
        nargs="?",
        const=(64, 64),
        metavar="IN:OUT",
        help="also one request alone (64:64)",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of LLM, repeatable"
    )
    parser.add_argument("--bandwidth", type=float, help="GB/s of the device, for the limit; measured if not given")
    parser.add_argument("--matmul", type=float, help="TFLOP/s of the device, for the limit; measured if not given")
    parser.add_argument("--breakdown", action="store_true", help="also print where the time of the batch's steps goes")
    parser.add_argument("--no-limit", action="store_true", help="leave the limit out")
    args = parser.parse_args()
    if args.repeat < 1 or args.warmup < 0:
        parser.error("--repeat is at least 1, --warmup at least 0")
    return args


def parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()):
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH or N, got {text!r}")
    return int(low), int(high or low)


def parse_option(text: str) -> tuple[str, Any]:
    """`key=value`; the value is JSON where it can be read as such, else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"--option must be KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def choose_workload(args: argparse.Namespace) -> tuple[Workload, Workload | None]:
    """The preset with the flags laid over it, and the workload of one request if asked for."""
    given = {
        "num_prompts": args.num_prompts,
        "input_tokens": args.input_len,
        "output_tokens": args.output_len,
        "vocab_limit": args.vocab_limit,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    workload = HEADLINE if args.headline else CPU
    workload = replace(workload, **{name: value for name, value in given.items() if value is not None})
    one = args.one_request or ((64, 64) if args.cpu_workload else None)
    if one is None:
        return workload, None
    return workload, replace(workload, num_prompts=1, input_tokens=(one[0],) * 2, output_tokens=(one[1],) * 2)


def generate(llm: LLM, workload: Workload, repetition: int) -> float:
    """Seconds that the requests of one repetition take together."""
    prompts, output_tokens = workload.draw(repetition)
    params = [SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True) for n in output_tokens]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    made = [len(output["token_ids"]) for output in outputs]
    if made != output_tokens:
        raise SystemExit(
            f"asked for {sum(output_tokens)} tokens, got {sum(made)}: the context is too short for the workload"
        )
    return seconds


def measure(label: str, num_runs: int, run: Callable[[int], float]) -> list[float]:
    seconds = []
    for number in range(num_runs):
        seconds.append(run(number))
        print(f"{label} {number + 1} of {num_runs}: {seconds[-1]:.2f} s", flush=True)
    return seconds


def time_first_token(llm: LLM, workload: Workload, repetition: int) -> float:
    """Seconds from a request to its first token, on an idle engine."""
    prompts, _ = workload.draw(10_000 + repetition)
    start = time.perf_counter()
    for _ in llm.stream(prompts[0], SamplingParams(temperature=workload.temperature, max_tokens=2, ignore_eos=True)):
        return time.perf_counter() - start
    raise SystemExit("the stream ended without a token")


def print_breakdown(model: str, options: dict[str, Any], workload: Workload) -> None:
    """Record one repetition in an engine of its own, and let a worker alone replay it under a profiler."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/steps"
        with LLM(model, **options, record_steps=file) as llm:
            generate(llm, workload, 1)
        command = [sys.executable, "-m", "minisgl_worker", "--replay", file, "--breakdown"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print("\n".join(output.splitlines()[:-1]))


def summarize(prefix: str, workload: Workload, seconds: list[float]) -> dict[str, Any]:
    prompt_tokens, output_tokens = (sum(lengths) for lengths in workload.draw_lengths())
    rates = [output_tokens / s for s in seconds]
    return {
        f"{prefix}prompt_tokens": prompt_tokens,
        f"{prefix}output_tokens": output_tokens,
        f"{prefix}seconds": [round(s, 3) for s in seconds],
        f"{prefix}tokens_per_s": [round(rate, 1) for rate in rates],
        f"{prefix}median_tokens_per_s": round(statistics.median(rates), 1),
    }


def find_limits(
    args: argparse.Namespace, model: str, options: dict[str, Any], workload: Workload, one_request: Workload | None
) -> dict[str, Any]:
    """The roofline of the same lengths, as tokens per second, for the dtype that the engine runs in."""
    config = resolve_model(str(model), need_weights=False).config
    dtype = str(options.get("dtype", "auto")).removeprefix("torch.")
    dtype = config.dtype if dtype == "auto" else dtype
    rates = find_rates(args, options, dtype)

    def limit(lengths: tuple[list[int], list[int]]) -> Limit:
        return compute_limit(config, *lengths, rates, VALUE_BYTES[dtype])

    limits: dict[str, Any] = {
        "limit": {"dtype": dtype, "bytes_per_s": rates.bytes_per_s, "flops": rates.flops},
        "limit_tokens_per_s": round(limit(workload.draw_lengths()).tokens_per_s, 1),
    }
    if one_request:
        limits["one_request_limit_tokens_per_s"] = round(limit(one_request.draw_lengths()).tokens_per_s, 1)
    return limits


def find_rates(args: argparse.Namespace, options: dict[str, Any], dtype: str) -> Rates:
    """Those given, else measured in a process of its own, so that this one holds no device memory."""
    if args.bandwidth and args.matmul:
        return Rates(args.bandwidth * 1e9, args.matmul * 1e12)
    device = options.get("device", "auto")
    if device == "auto":
        device = "cuda" if describe_machine()["gpus"] else "cpu"
    command = [sys.executable, str(Path(__file__).with_name("roofline.py")), "--measure", device, "--dtype", dtype]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Rates(
        args.bandwidth * 1e9 if args.bandwidth else measured["bytes_per_s"],
        args.matmul * 1e12 if args.matmul else measured["flops"],
    )


def print_table(result: dict[str, Any]) -> None:
    for prefix, label in (("", "batch"), ("one_request_", "one request")):
        median = result.get(f"{prefix}median_tokens_per_s")
        if median is None:
            continue
        sizes = f"{result[f'{prefix}prompt_tokens']:,} prompt, {result[f'{prefix}output_tokens']:,} output tokens"
        runs = ", ".join(f"{rate:,.1f}" for rate in result[f"{prefix}tokens_per_s"])
        print(f"{label:12} {median:10,.1f} tok/s at the median of {runs}  ({sizes})")
        limit = result.get(f"{prefix}limit_tokens_per_s")
        if limit:
            print(f"{'  limit':12} {limit:10,.1f} tok/s, of which {median / limit:.0%} reached")
    print(f"{'first token':12} {result['first_token_s'] * 1e3:10,.1f} ms")


if __name__ == "__main__":
    main()
