"""The application in this process, attached to a scripted engine: slow bodies, and clients that leave at any moment."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fake_engine import FakeEngine
from starlette.types import ASGIApp, Message

from minisgl.llm import LLM
from minisgl.server.app import make_app
from minisgl.server.service import Service

WAIT_S = 40.0
ASK = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
NUM_MOMENTS = 60  # turns of the event loop after which a client leaves; a call takes fewer until its first byte


@pytest.fixture
def service(llm: LLM) -> Service:
    return Service(llm, "tiny", {})


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[int]:
    """The port at which uvicorn serves the application."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", ws="none", lifespan="off", log_level="warning"))
    task = asyncio.create_task(server._serve())  # without its handlers of signals
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


def head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )


def test_body_that_trickles_is_408_and_its_connection_ends(service):
    async def trickle() -> bytes:
        async with listening(make_app(service, None, body_timeout_s=1.0)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(1000))
            received = asyncio.create_task(asyncio.wait_for(reader.read(), WAIT_S))  # up to the end
            while not received.done():
                writer.write(b" ")
                await asyncio.sleep(0.05)
            writer.close()
            return received.result()

    reply = asyncio.run(trickle())
    assert b" 408 " in reply.splitlines()[0]
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def test_body_that_comes_in_time_but_in_pieces_is_answered(service):
    async def send() -> bytes:
        async with listening(make_app(service, None)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({**ASK, "max_tokens": 3}).encode()
            writer.write(head(len(body)))
            for i in range(len(body)):
                writer.write(body[i : i + 1])
                await asyncio.sleep(0.001)
            line = await asyncio.wait_for(reader.readline(), WAIT_S)
            writer.close()
            return line

    assert b" 200 " in asyncio.run(send())


def test_client_that_leaves_in_its_body_is_no_fault_of_the_server(service, caplog):
    async def leave() -> None:
        async with listening(make_app(service, None)) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(1000) + b"{")
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            while b'http_replies_total{status="' not in service.metrics.render(service.llm.stats()):
                await asyncio.sleep(0.01)
            assert b'status="499"' in service.metrics.render(service.llm.stats())

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(leave(), WAIT_S))
    assert not caplog.records


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["client leaves", "server cancels"])
@pytest.mark.parametrize("change", [{}, {"stream": True}, {"prompt": ["a", "b"], "n": 2, "stream": True}])
def test_client_that_leaves_at_any_moment_leaves_nothing(
    service: Service, engine: FakeEngine, change: dict[str, Any], is_cancelled: bool
) -> None:
    app = make_app(service, None)

    async def call(num_turns: int) -> None:
        has_left = asyncio.Event()
        messages: list[Message] = [{"type": "http.request", "body": json.dumps({**ASK, **change}).encode()}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await asyncio.sleep(0)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
        task = asyncio.ensure_future(app(scope, receive, send))
        for _ in range(num_turns):
            # Half the calls get past the thread that encodes, which takes no certain number of turns.
            await asyncio.sleep(0.0005 if num_turns % 2 else 0)
        if is_cancelled:
            task.cancel()
        has_left.set()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), WAIT_S)

    async def call_all() -> None:
        for num_turns in range(NUM_MOMENTS):
            await call(num_turns)
            assert service._num_samples == 0, f"room is still kept for a client that left after {num_turns} turns"

    asyncio.run(call_all())
    assert len(engine.requests()) > NUM_MOMENTS / 6, "hardly any call came as far as the engine"
    engine.wait_for(lambda: not engine.running, WAIT_S)


def test_token_that_is_a_part_of_a_character_has_its_real_bytes(service):
    async def ask() -> list[Any]:
        app = make_app(service, None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            client = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", http_client=http, max_retries=0)
            reply = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=140, logprobs=True, top_logprobs=1
            )
            logprobs = reply.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            return logprobs.content

    # The engine counts on from the "<" at the end of the template, and a token of this model is a byte.
    tokens = asyncio.run(ask())
    assert [token.bytes for token in tokens] == [[ord("<") + 1 + i] for i in range(140)]
    assert [token.top_logprobs[0].bytes for token in tokens] == [[ord("<") + 2 + i] for i in range(140)]
    assert tokens[0].token == "=" and tokens[-1].token == "\ufffd"
