"""The routes, and what stands in front of them: key, body limit, errors in one shape, clients that leave or dawdle."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.errors import MinisglError
from minisgl.server.errors import ApiError, to_api_error
from minisgl.server.openai import read_call, read_json
from minisgl.server.replies import make_events, make_reply
from minisgl.server.service import Answer, Service

MAX_BODY_BYTES = 16 * 2**20
LARGE_BODY_BYTES = 64 * 2**10  # from here on, JSON is read on another thread
BODY_TIMEOUT_S = 30.0  # for a client to send its body
SEND_TIMEOUT_S = 30.0  # for a reader to take a few buffers' worth; then its request ends
OPEN_PATHS = ("/health", "/ready")

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def make_app(service: Service, api_key: str | None, *, body_timeout_s: float = BODY_TIMEOUT_S) -> ASGIApp:
    """The application. With a key, every path but /health and /ready needs it, unknown paths too."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if service.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        service.llm.check_alive()
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.render(await service.run(service.llm.stats))
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [describe_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        service.check_model(name)
        return json_response(describe_model(service))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await answer_call(service, await read_body(request, body_timeout_s), request, is_chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer_call(service, await read_body(request, body_timeout_s), request, is_chat=True)

    async def report(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def report_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    async def report_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # for the log alone

    app.add_exception_handler(HTTPException, report_http)
    app.add_exception_handler(ClientGone, report_gone)
    app.add_exception_handler(ClientDisconnect, report_gone)
    for kind in (ApiError, MinisglError):
        app.add_exception_handler(kind, report)
    return Gate(app, service, api_key)


class Gate:
    """Lets requests with the right key through, counts replies, and turns what goes wrong into a reply.

    Keys are compared in constant time, as hashes, so that their length does not show either.
    """

    def __init__(self, app: ASGIApp, service: Service, api_key: str | None):
        self._app, self._service = app, service
        self._digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def count(message: Any) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._service.metrics.replies.labels(str(message["status"])).inc()
            await send(message)

        if not self._is_allowed(scope):
            error = ApiError(401, "the API key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")
            await error_response(error)(scope, receive, count)
            return
        try:
            await self._app(scope, receive, count)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise
            await error_response(error)(scope, receive, count)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._digest is None or scope["path"] in OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest) and scheme.lower() == b"bearer"


async def answer_call(service: Service, body: bytes, request: Request, *, is_chat: bool) -> Response:
    """Check and send a completion call; the reply, or its stream."""
    values = await service.run(read_json, body) if len(body) > LARGE_BODY_BYTES else read_json(body)
    if values.get("model") is not None:
        service.check_model(values["model"])
    call = read_call(values, is_chat=is_chat, defaults=service.defaults)
    answer = service.admit(call)
    try:
        await while_connected(request.receive, answer.send())
        if not call.is_stream:
            return json_response(await while_connected(request.receive, make_reply(answer)))
        events = make_events(answer)
        first = await while_connected(request.receive, anext(events))
    except BaseException:
        answer.close()
        raise
    finally:
        if not call.is_stream:
            answer.close()
    return EventStream(answer, first, events)


class EventStream(Response):
    """Sends events as they come. Ends the request when its reader has left, or takes nothing for a long time."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: bytes, events: AsyncIterator[bytes]):
        super().__init__(headers={"cache-control": "no-store", "x-request-id": answer.id})
        del self.headers["content-length"]
        self._answer, self._first, self._events = answer, first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientGone, TimeoutError, OSError):
            pass
        finally:
            self._answer.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, self._first)
        async for event in self._events:
            await self._send(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def while_connected(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The body, which may not be larger than `MAX_BODY_BYTES`. Raises ApiError 408, 413, 415."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be application/json, got {kind[:60]!r}")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="body_timeout") from None
    return bytes(body)


def describe_model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "minisgl",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.llm.context_tokens,
    }


def json_response(values: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII: text of a client may hold half a surrogate pair, which has no UTF-8.
    extra = {"x-request-id": values["id"]} if isinstance(values.get("id"), str) and "choices" in values else {}
    return Response(json.dumps(values), status, {**extra, **(headers or {})}, media_type="application/json")


def error_response(error: Exception) -> Response:
    told = to_api_error(error)
    return json_response(told.body, told.status, told.headers)
