#!/usr/bin/env python3
"""Serves the small model on the CPU to good, bad, leaving and slow clients at once; then looks what they left behind.

    python scripts/mixed_load.py --minutes 10

The load runs in parts of a minute, or three if the time is short. After each the server must come to rest: no request,
every page free or cached, room for as many requests as ever. After the last, no process may have grown by more than
`MAX_GROWTH_BYTES` over the first, and the server must still answer and end with exit code 0, leaving no process. Any
reply that its client should not have got ends the run. Exit codes: 0 all well, 1 with the fault's traceback. Linux.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

KEY = "secret"
NUM_PAGES, CONTEXT_TOKENS = 128, 512
NUM_CLIENTS = 8
MAX_QUEUED_REQ, WINDOW = 256, 64  # the server takes a quarter of what the engine queues
PART_S = 60
START_S = 120
REST_S = 60  # for the server to come to rest when its clients are gone
REPLY_S = 120
# Of a process at rest, from the first part to the last. One leaked large body is half of it.
MAX_GROWTH_BYTES = 32 * 2**20
LARGE_BYTES = 17 * 2**20
STEP_BYTES = 512  # what a slow client reads at once

GOOD = {"model": "small", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
WRONG_FIELDS: tuple[dict[str, object], ...] = (
    {"no_such_field": 1}, {"temperature": -1}, {"max_tokens": "5"}, {"n": 10**6}, {"prompt": []}, {"prompt": [10**9]},
    {"prompt": "word " * 2 * CONTEXT_TOKENS}, {"stream_options": {}}, {"logit_bias": {"x": 1}}, {"prompt": "\ud800"},
)  # fmt: skip
WRONG_BYTES = (b"", b"{", b"[]", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 50_000)


class Load:
    """Clients of one server; `counts` says how often each kind ended how."""

    def __init__(self, port: int, seed: int):
        self.port = port
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=REPLY_S
        )
        self._kinds: dict[Callable[[], Awaitable[str]], int] = {
            self.ask_whole: 4, self.ask_stream: 4, self.ask_chat: 3, self.send_wrong_field: 4, self.send_wrong_bytes: 3,
            self.send_wrong_key: 2, self.send_large_body: 1, self.leave_stream: 4, self.leave_before_first_byte: 3,
            self.leave_in_body: 2,
            self.read_slowly: 2, self.write_slowly: 2,
        }  # fmt: skip

    async def run(self, seconds: float) -> None:
        """Let all clients work for that long, and wait until each is done."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._work_until(deadline))

    async def fill_pages(self) -> None:
        """Have every page written once, since memory counts from then on."""
        prompts = [[self.chance.randrange(100, 1000) for _ in range(CONTEXT_TOKENS - 20)] for _ in range(NUM_CLIENTS)]
        reply = await self.http.post("/v1/completions", json={**GOOD, "prompt": prompts})
        assert reply.status_code == 200, reply.text

    async def ask_for_all_room(self) -> None:
        """As many samples as the server admits at once: room that it still keeps for somebody would be missing."""
        for num_more, status in ((0, 200), (1, 400)):
            prompts = [GOOD["prompt"]] * (WINDOW + num_more)
            reply = await self.http.post("/v1/completions", json={**GOOD, "prompt": prompts, "max_tokens": 1})
            assert reply.status_code == status, reply.text

    async def _work_until(self, deadline: float) -> None:
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while time.monotonic() < deadline:
            (kind,) = self.chance.choices(kinds, weights)
            outcome = await kind()
            self.counts[f"{kind.__name__}: {outcome}"] += 1

    async def ask_whole(self) -> str:
        reply = await self.http.post("/v1/completions", json=GOOD)
        assert reply.status_code == 200 and "Paris" in reply.json()["choices"][0]["text"], reply.text
        return "200"

    async def ask_stream(self) -> str:
        words = " ".join(str(self.chance.randrange(1000)) for _ in range(self.chance.randrange(1, 60)))
        body = {**GOOD, "prompt": words, "max_tokens": self.chance.randrange(1, 40), "stream": True, "ignore_eos": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = [line async for line in reply.aiter_lines() if line]
        assert reply.status_code == 200 and lines[-1] == "data: [DONE]" and '"length"' in lines[-2], lines[-2:]
        return "200"

    async def ask_chat(self) -> str:
        messages = [{"role": "user", "content": f"Say {self.chance.randrange(100)}."}]
        body = {"model": "small", "messages": messages, "max_tokens": 12, "n": 2, "logprobs": True, "top_logprobs": 2}
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 2, reply.text
        return "200"

    async def send_wrong_field(self) -> str:
        body = json.dumps({**GOOD, **self.chance.choice(WRONG_FIELDS)})
        return await self._expect_refusal(400, body.encode())

    async def send_wrong_bytes(self) -> str:
        return await self._expect_refusal(400, self.chance.choice(WRONG_BYTES))

    async def send_wrong_key(self) -> str:
        return await self._expect_refusal(401, json.dumps(GOOD).encode(), key="wrong")

    async def send_large_body(self) -> str:
        try:
            return await self._expect_refusal(413, b" " * LARGE_BYTES)
        except httpx.TransportError:  # the server hung up before all was written, as it may
            return "closed"

    async def leave_stream(self) -> str:
        reader, writer = await self._open({**GOOD, "max_tokens": 400, "stream": True, "ignore_eos": True})
        for _ in range(self.chance.randrange(1, 30)):
            assert await asyncio.wait_for(reader.readline(), REPLY_S), "the server ended a stream"
        writer.transport.abort()
        return "left"

    async def leave_before_first_byte(self) -> str:
        _, writer = await self._open({**GOOD, "max_tokens": 400, "n": 2, "stream": self.chance.random() < 0.5})
        await asyncio.sleep(self.chance.random() * 0.2)
        writer.transport.abort()
        return "left"

    async def leave_in_body(self) -> str:
        _, writer = await self._open(GOOD, num_missing=self.chance.randrange(1, 60))
        writer.close()
        return "left"

    async def read_slowly(self) -> str:
        body = {**GOOD, "max_tokens": 100, "stream": True, "ignore_eos": True, "logprobs": 5}
        reader, writer = await self._open(body, limit=STEP_BYTES)
        received = b""
        while chunk := await asyncio.wait_for(reader.read(STEP_BYTES), REPLY_S):
            received = received[-STEP_BYTES:] + chunk
            if b"[DONE]" in received:
                break
            await asyncio.sleep(0.01)
        assert b"[DONE]" in received, received
        writer.close()
        return "200"

    async def write_slowly(self) -> str:
        reader, writer = await self._open(GOOD, pieces=10)
        status = await asyncio.wait_for(reader.readline(), REPLY_S)
        assert b" 200 " in status, status
        writer.close()
        return "200"

    async def _expect_refusal(self, status: int, body: bytes, key: str = KEY) -> str:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        reply = await self.http.post("/v1/completions", content=body, headers=headers)
        assert reply.status_code == status and reply.json()["error"]["message"], (status, body[:100], reply.text)
        return str(status)

    async def _open(
        self, body: object, *, pieces: int = 1, limit: int = 2**16, num_missing: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a connection of its own, in pieces with pauses between them."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        content = json.dumps(body).encode()
        sent = content[: len(content) - num_missing]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode())
        size = -(-len(sent) // pieces)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await writer.drain()
            if pieces > 1:
                await asyncio.sleep(0.1)
        return reader, writer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    flags = ["--device", "cpu", "--num-pages", str(NUM_PAGES), "--max-seq-len", str(CONTEXT_TOKENS)]
    flags += ["--max-queued-req", str(MAX_QUEUED_REQ)]
    flags += ["--served-model-name", "small", "--api-key", KEY, "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "minisgl", "serve", parsed.model, *flags])
    processes: dict[int, str] = {}
    try:
        wait_ready(server, port)
        processes = list_processes(server.pid)
        asyncio.run(measure(Load(port, parsed.seed), processes, parsed.minutes * 60))
        server.send_signal(signal.SIGTERM)
        assert server.wait(REST_S) == 0, f"the server ended with {server.returncode}"
        wait_for(lambda: not any(Path(f"/proc/{i}").exists() for i in processes if i != server.pid), "processes left")
    finally:
        server.kill()
        server.wait()
    print("all well")
    return 0


async def measure(load: Load, processes: dict[int, str], seconds: float) -> None:
    """All parts of the load, and what must hold after each."""
    num_parts = max(3, round(seconds / PART_S))
    sizes: list[dict[str, int]] = []  # of each process, at rest after each part
    await load.fill_pages()
    for part in range(num_parts):
        await load.run(seconds / num_parts)
        await rest(load)
        await load.ask_for_all_room()
        gauges = await rest(load)
        sizes.append({name: read_resident_bytes(pid) for pid, name in processes.items()})
        told = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes[-1].items())
        print(f"at rest after part {part + 1} of {num_parts}: {told}; {gauges}", flush=True)
    for outcome, count in sorted(load.counts.items()):
        print(f"{count:7} {outcome}")
    growths = {name: sizes[-1][name] - sizes[0][name] for name in sizes[0]}
    assert max(growths.values()) <= MAX_GROWTH_BYTES, f"memory grew: {growths} bytes, limit {MAX_GROWTH_BYTES}"
    await load.ask_whole()
    await load.ask_stream()
    await load.http.aclose()


async def rest(load: Load) -> dict[str, int]:
    """Wait until no request is left and every page is free or cached; the gauges of /metrics then."""
    deadline = time.monotonic() + REST_S
    while True:
        lines = (await load.http.get("/metrics")).text.splitlines()
        pairs = [line.removeprefix("minisgl:").split() for line in lines if line.startswith("minisgl:")]
        gauges = {name: int(float(value)) for name, value in pairs if name.startswith(("num_requests_", "kv_pages_"))}
        busy = [name for name in gauges if name.startswith("num_requests_") and gauges[name]]
        assert len(gauges) == 6, gauges
        if not busy and gauges["kv_pages_free"] + gauges["kv_pages_cached"] == NUM_PAGES:
            return gauges
        assert time.monotonic() < deadline, f"the server does not come to rest: {gauges}"
        await asyncio.sleep(0.1)


def wait_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    def is_ready() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, "the server does not start", START_S)


def wait_for(claim: Callable[[], bool], fault: str, seconds: float = REST_S) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, fault
        time.sleep(0.1)


def list_processes(root: int) -> dict[int, str]:
    """The server, its engine and its worker: name of each process id."""
    found = {root: "server"}
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            name = next((name for name in ("minisgl_worker", "minisgl.engine") if name.encode() in command), "other")
            found |= {**list_processes(child), child: name}
    return found


def read_resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


if __name__ == "__main__":
    sys.exit(main())
