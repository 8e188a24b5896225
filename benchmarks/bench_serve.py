#!/usr/bin/env python3
"""What server and engine cost when the device costs nothing: streamed tokens per second, and the server loop's lag.

    python benchmarks/bench_serve.py --model FOLDER --num-streams 256 --max-tokens 400

FOLDER needs a config.json and a tokenizer; the worker is the tests' fake one. Clients are raw sockets in this process,
which count events and parse none. The lag is the time that GET /health takes meanwhile, a round trip and the clients'
own delays included: an upper bound of the loop's lag. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_commit, describe_machine

ROOT = Path(__file__).resolve().parents[1]
PROBE_INTERVAL_S = 0.05


async def request(port: int, head: str, body: bytes = b"") -> int:
    """Send one request and read to the end; the number of events with a token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(f"{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
    writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    num_events = 0
    rest = b""
    while chunk := await reader.read(2**16):
        rest += chunk
        num_events += rest.count(b'"text":')
        rest = rest[-6:]
    writer.close()
    return num_events


async def probe(port: int, lags: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await request(port, "GET /health")
        lags.append(time.perf_counter() - started)
        await asyncio.sleep(PROBE_INTERVAL_S)


async def measure(port: int, num_streams: int, max_tokens: int) -> dict[str, float]:
    body = json.dumps({"prompt": [7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    await request(port, "POST /v1/completions", body)
    lags: list[float] = []
    prober = asyncio.create_task(probe(port, lags))
    started = time.perf_counter()
    counts = await asyncio.gather(*(request(port, "POST /v1/completions", body) for _ in range(num_streams)))
    seconds = time.perf_counter() - started
    prober.cancel()
    lags.sort()
    return {
        "tokens_per_s": num_streams * max_tokens / seconds,
        "events_per_s": sum(counts) / seconds,
        "seconds": seconds,
        "health_p50_ms": lags[len(lags) // 2] * 1e3,
        "health_p99_ms": lags[int(len(lags) * 0.99)] * 1e3,
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
