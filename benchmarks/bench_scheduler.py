#!/usr/bin/env python3
"""Host time that the scheduler adds to a step: receive (decode the Result), complete, schedule, pack (encode the Step).

    python benchmarks/bench_scheduler.py --num-running 16 256 2048 --num-steps 4000

Requests decode at random places in their pages, so that steps grant pages as in a real run; half of them stream, to
two clients. "steady" steps neither admit nor end a request. In "turnover" steps requests end at random times and new
ones of 16 prompt tokens take their slots at once. The last line of the output is one JSON object, in microseconds.
"""

import argparse
import gc
import json
import time

import numpy as np

from machine import describe_commit, describe_machine
from minisgl.protocol import Result, Sampling, Step, decode, encode
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig

VOCAB_SIZE = 151_936
STOP_IDS = np.array([VOCAB_SIZE - 2, VOCAB_SIZE - 1], np.int32)  # never sampled here
SAMPLING = Sampling(0.6, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, STOP_IDS.tobytes(), b"", b"", None)
PROMPT_TOKENS = 16
STEPS_IN_FLIGHT = 2
NUM_WARMUP_STEPS = 200


class Bench:
    """A scheduler kept busy, with results from nowhere."""

    def __init__(self, num_running: int, page_size: int, num_steps: int, mean_output_tokens: int | None) -> None:
        """`mean_output_tokens` None: no request ends within `num_steps`."""
        self._random = np.random.default_rng(0)
        self._mean_output_tokens = mean_output_tokens
        longest = num_steps + NUM_WARMUP_STEPS + 4 * num_running + PROMPT_TOKENS + 256
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_running * (longest // page_size + 2),
                page_size=page_size,
                max_running_req=num_running,
                max_extend_tokens=8192,
                context_limit_tokens=longest,
                vocab_size=VOCAB_SIZE,
                max_steps_in_flight=STEPS_IN_FLIGHT,
            )
        )
        self._longest = longest
        self._num_requests = 0
        self._num_decode_rows = 0
        self._frames: list[bytes] = []  # results of issued steps
        self._num_running = num_running
        self._page_size = page_size
        self._start()

    def step_us(self) -> float:
        """Complete the oldest step and issue one more. Returns the time of the four parts."""
        frame = self._frames.pop(0)
        start = time.perf_counter_ns()
        result = decode(frame)
        assert isinstance(result, Result)
        outputs = self._scheduler.complete(result)
        step = self._scheduler.schedule(0.0)
        assert step is not None
        encode(step)
        elapsed_us = (time.perf_counter_ns() - start) / 1e3
        self._answer(step)
        for _ in range(int(np.count_nonzero(outputs.finish_reasons))):
            self._add_request(int(self._random.exponential(self._mean_output_tokens or 0)) + 1)
        return elapsed_us

    def _start(self) -> None:
        """All requests decode, at random places in their pages, and the pipeline is full."""
        for _ in range(self._num_running):
            if self._mean_output_tokens is None:
                self._add_request(self._longest, int(self._random.integers(self._page_size)))
            else:
                self._add_request(int(self._random.exponential(self._mean_output_tokens)) + 1)
        while True:
            step = self._scheduler.schedule(0.0)
            assert step is not None
            self._answer(step)
            if not step.prefills and self._scheduler.num_in_flight == STEPS_IN_FLIGHT:
                return
            if step.prefills or self._scheduler.num_in_flight == STEPS_IN_FLIGHT:
                self._scheduler.complete(self._pop_result())

    def _pop_result(self) -> Result:
        result = decode(self._frames.pop(0))
        assert isinstance(result, Result)
        return result

    def _add_request(self, max_tokens: int, num_more_tokens: int = 0) -> None:
        number = self._num_requests
        prompt = self._random.integers(0, VOCAB_SIZE - 2, PROMPT_TOKENS + num_more_tokens, np.int32)
        # Of four requests in a row two stream, one to each client.
        client_id, is_streaming = number % 2, number % 4 < 2
        self._scheduler.add_request(Request(client_id, number, prompt, max_tokens, SAMPLING, number, is_streaming))
        self._num_requests += 1

    def _answer(self, step: Step) -> None:
        if step.decode_slots is not None:
            self._num_decode_rows = len(step.decode_slots) // 4
        last_chunks = np.frombuffer(step.prefills, np.int32).reshape(-1, 4)[:, 3]
        num_rows = (self._num_decode_rows if step.run_decode else 0) + int(last_chunks.sum())
        tokens = self._random.integers(0, VOCAB_SIZE - 2, num_rows, np.uint32)
        self._frames.append(encode(Result(step.step_id, tokens.tobytes(), b"", b"")))


def measure(num_running: int, page_size: int, num_steps: int, mean_output_tokens: int | None) -> dict[str, float]:
    bench = Bench(num_running, page_size, num_steps, mean_output_tokens)
    for _ in range(NUM_WARMUP_STEPS):
        bench.step_us()
    gc.collect()
    gc.disable()  # as the engine does between steps
    times = np.array([bench.step_us() for _ in range(num_steps)])
    gc.enable()
    return {
        "median_us": round(float(np.median(times)), 1),
        "mean_us": round(float(times.mean()), 1),
        "p99_us": round(float(np.percentile(times, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-running", type=int, nargs="+", default=[16, 256, 2048])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=4000)
    parser.add_argument("--mean-output-tokens", type=int, default=512, help="of the turnover runs")
    args = parser.parse_args()
    rows = []
    print(f"{'kind':>8} {'running':>8} {'median us':>10} {'mean us':>10} {'p99 us':>10}")
    for kind, mean_output_tokens in (("steady", None), ("turnover", args.mean_output_tokens)):
        for num_running in args.num_running:
            times = measure(num_running, args.page_size, args.num_steps, mean_output_tokens)
            rows.append({"kind": kind, "num_running": num_running, **times})
            print(f"{kind:>8} {num_running:>8} " + " ".join(f"{value:>10}" for value in times.values()), flush=True)
    result = {"benchmark": "scheduler", "page_size": args.page_size, "num_steps": args.num_steps, "rows": rows}
    print(json.dumps(result | {"commit": describe_commit(), "machine": describe_machine()}))


if __name__ == "__main__":
    main()
