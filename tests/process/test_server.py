"""The server as a process, attached to a scripted engine: limits, clients that leave, and ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from waiting import wait_until

from minisgl.errors import EXIT_CHILD_DIED
from minisgl.protocol import Rejected, RejectReason

WAIT_S = 10.0
ASK = {"model": "tiny", "prompt": [7], "max_tokens": 5}
ENDLESS = {**ASK, "max_tokens": 400, "stream": True, "ignore_eos": True}


class Server:
    def __init__(self, address: str, folder: Path, *flags: str):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        command = [sys.executable, "-m", "minisgl", "serve", str(folder), "--engine", address]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", "tiny", "--port", str(self.port), *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.ready_line = self.process.stderr.readline()
        self.url = f"http://127.0.0.1:{self.port}"

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_S, **options)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(engine: FakeEngine, folder: Path) -> Iterator[Server]:
    server = Server(engine.address, folder)
    yield server
    server.end()


def test_ready_line_states_url_and_memory(server):
    assert f"{server.url}/v1" in server.ready_line and "KV tokens" in server.ready_line


def test_completion_and_usage(server, engine):
    engine.num_cached_tokens = 3
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    reply = client.completions.create(**ASK)
    assert reply.usage.completion_tokens == 5 and reply.usage.prompt_tokens_details.cached_tokens == 3


def test_model_may_be_null_or_left_out_but_not_another(server):
    assert server.post({**ASK, "model": None}).status_code == 200
    assert server.post({name: value for name, value in ASK.items() if name != "model"}).status_code == 200
    for model, status in (("other", 404), (5, 400)):
        error = server.post({**ASK, "model": model})
        assert (error.status_code, error.json()["error"]["param"]) == (status, "model")


def test_full_queue_is_429_with_retry_after(server, engine):
    engine.reject = lambda request: Rejected(request.request_id, RejectReason.OVERLOADED, "full")
    for body in (ASK, {**ASK, "stream": True}):
        reply = server.post(body)
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0, body


def test_more_requests_than_the_window_are_429(server, engine):
    engine.is_paused = True
    with httpx.Client(timeout=WAIT_S) as client:
        waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(engine.window)]
        body = json.dumps(ENDLESS).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        for one in waiting:
            one.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: len(engine.running) == engine.window, WAIT_S)
        assert client.post(server.url + "/v1/completions", json=ASK).status_code == 429
        for one in waiting:
            one.close()
        wait_until(lambda: not engine.running, WAIT_S)
        engine.is_paused = False
        assert client.post(server.url + "/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize("body", [ENDLESS, {**ENDLESS, "stream": False}])
def test_client_that_leaves_frees_its_request(server, engine, body):
    engine.is_paused = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: not engine.running, WAIT_S)


@pytest.mark.parametrize(
    "status, options",
    [
        (404, {"path": "/v1/nothing"}),
        (405, {"path": "/v1/models"}),
        (415, {"headers": {"content-type": "text/plain"}}),
    ],
)
def test_errors_of_http_have_openais_shape(server, status, options):
    reply = server.post(ASK, **options)
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_large_body_and_large_header_are_refused(server):
    assert server.post({**ASK, "prompt": "x" * 17 * 2**20}).status_code == 413
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2**17)
        assert b" 400 " in one.recv(1024)
    assert server.post(ASK).status_code == 200


def test_key_guards_all_but_health_and_ready(engine, folder):
    server = Server(engine.address, folder, "--api-key", "secret")
    try:
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
        assert {httpx.get(server.url + path).status_code for path in ("/metrics", "/v1/models", "/x", "/health/")} == {
            401
        }
        for key, status in {
            "Bearer secret": 200, "bearer secret": 200, "BEARER  secret": 200, "secret": 401, "Basic secret": 401,
            "Bearer": 401, "Bearer secret2": 401, "Bearer Secret": 401, "Bearer ": 401,
        }.items():  # fmt: skip
            reply = httpx.get(server.url + "/v1/models", headers={"authorization": key.strip()})
            assert reply.status_code == status, key
    finally:
        server.end()


def test_sigterm_finishes_a_running_stream_and_exits_0(server, engine):
    engine.is_paused = True
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as one:
        body = json.dumps({**ASK, "stream": True}).encode()
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: bool(engine.running), WAIT_S)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        engine.is_paused = False
        received = b""
        while chunk := one.recv(65536):
            received += chunk
    assert b"[DONE]" in received
    assert server.process.wait(WAIT_S) == 0


def test_second_sigterm_ends_a_drain_at_once_with_143(server, engine):
    engine.is_paused = True
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as one:
        body = json.dumps(ENDLESS).encode()
        one.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: bool(engine.running), WAIT_S)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(server.port), WAIT_S)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 128 + signal.SIGTERM  # well before the drain's own end


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
    except OSError:
        return False
    return True


def test_dead_engine_ends_streams_with_an_error_and_the_server(server, engine):
    with httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=WAIT_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        engine.is_silent = True
        engine.is_paused = True
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert server.process.wait(WAIT_S) == EXIT_CHILD_DIED
