#!/usr/bin/env python3
"""What server and engine cost when the device costs nothing: streamed tokens per second, and the server loop's lag.

    python benchmarks/bench_serve.py --model FOLDER --num-streams 256 --max-tokens 400

FOLDER needs a config.json and a tokenizer; the worker is the tests' fake one. Clients are raw sockets in this process,
which count events and parse none. The loop's lag is the server's own metric, while the requests arrive (all at once)
and while all streams run. The default step time offers far more tokens than the server can write; for a given rate of
tokens, say --step-s as NUM_STREAMS divided by it. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_commit, describe_machine

ROOT = Path(__file__).resolve().parents[1]


class Client:
    """One connection with one streamed completion."""

    def __init__(self, port: int, body: bytes):
        self._port, self._body = port, body
        self.has_begun = asyncio.Event()  # to receive tokens
        self.num_events = 0  # with tokens

    async def run(self) -> None:
        """Send the request and read to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(self._body) + self._body)
        rest = b""
        while chunk := await reader.read(2**16):
            rest += chunk
            self.num_events += rest.count(b'"text":')
            if self.num_events:
                self.has_begun.set()
            rest = rest[-6:]
        writer.close()


async def read_lags(port: int) -> dict[float, float]:
    """The server's own histogram of its event loop's lag: for each upper bound in seconds, how many were not above."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    assert text.startswith("HTTP/1.1 200"), text[:1000]
    found = re.findall(r'event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    return {float(bound): float(count) for bound, count in found}


def bound_quantile(earlier: dict[float, float], later: dict[float, float], share: float) -> float:
    """The least bound of the histogram under which `share` of what came between two readings lies."""
    counts = {bound: later[bound] - earlier[bound] for bound in sorted(later)}
    return next(bound for bound, count in counts.items() if count >= share * counts[float("inf")])


async def measure(port: int, num_streams: int, max_tokens: int) -> dict[str, float]:
    body = json.dumps({"prompt": [7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    await Client(port, body).run()
    at_start = await read_lags(port)
    clients = [Client(port, body) for _ in range(num_streams)]
    started = time.perf_counter()
    tasks = [asyncio.create_task(client.run()) for client in clients]
    await asyncio.gather(*(client.has_begun.wait() for client in clients))
    arrived_s = time.perf_counter() - started
    at_arrival = await read_lags(port)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    at_first_end = await read_lags(port)
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - started
    return {
        "tokens_per_s": num_streams * max_tokens / seconds,
        "events_per_s": sum(client.num_events for client in clients) / seconds,
        "seconds": seconds,
        "arrival_s": arrived_s,
        "arrival_lag_p99_at_most_ms": bound_quantile(at_start, at_arrival, 0.99) * 1e3,
        "lag_p50_at_most_ms": bound_quantile(at_arrival, at_first_end, 0.5) * 1e3,
        "lag_p99_at_most_ms": bound_quantile(at_arrival, at_first_end, 0.99) * 1e3,
    }


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--step-s", type=float, default=0.001, help="what a step takes in the fake worker")
    parser.add_argument("--vocab-size", type=int, default=320)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        address = f"ipc://{folder}/engine.sock"
        environment = {
            **os.environ, "MINISGL_FAKE_VOCAB": str(arguments.vocab_size), "MINISGL_FAKE_CONTEXT": "4096",
            "MINISGL_FAKE_STEP_S": str(arguments.step_s),
        }  # fmt: skip
        engine = subprocess.Popen(
            [sys.executable, "-m", "minisgl.engine", "--model", arguments.model, "--address", address, "--num-pages",
             "65536", "--worker-module", "tests.process.fake_worker"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert engine.stdout is not None and engine.stdout.readline()
        server = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", arguments.model, "--engine", address, "--port", str(port)],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert server.stderr is not None and "serves" in server.stderr.readline()
            before = cpu_seconds(server.pid), cpu_seconds(engine.pid), resource.getrusage(resource.RUSAGE_SELF).ru_utime
            result = asyncio.run(measure(port, arguments.num_streams, arguments.max_tokens))
            after = cpu_seconds(server.pid), cpu_seconds(engine.pid), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        finally:
            for process in (server, engine):
                process.terminate()
                process.wait(20)
        names = ("server_cpu_s", "engine_cpu_s", "clients_cpu_s")
        spent = {name: late - early for name, early, late in zip(names, before, after, strict=True)}
        print(json.dumps({**result, **spent, "commit": describe_commit(), "machine": describe_machine()}))


if __name__ == "__main__":
    main()
