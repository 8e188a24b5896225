"""From options to the exit code: start the engine, listen, drain at SIGTERM, end when the engine does."""

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from minisgl.core import SamplingParams
from minisgl.errors import EXIT_ADDRESS, EXIT_CHILD_DIED, EXIT_START, EXIT_USAGE, MinisglError, ModelLoadError
from minisgl.llm import LLM
from minisgl.server.app import make_app
from minisgl.server.service import Service

DRAIN_LIMIT_S = 30  # after SIGTERM, for requests to finish
ENGINE_CHECK_S = 0.25
LAG_CHECK_S = 0.05
MAX_HEADER_BYTES = 64 * 2**10
BACKLOG = 1024
DEFAULT_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

logger = logging.getLogger(__name__)


def serve(
    model: str | None,
    options: Mapping[str, Any],
    *,
    engine: str | None,
    host: str,
    port: int,
    served_model_name: str | None,
    api_key: str | None,
) -> int:
    """Serve until a signal or the engine's end; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="minisgl: %(levelname)s %(message)s", stream=sys.stderr)
    try:
        listener = listen(host, port)
    except OSError as error:
        return _fail(f"cannot listen at {host}:{port}: {error.strerror or error}", EXIT_ADDRESS)
    try:
        with LLM(model, engine=engine, **options) as llm:
            name = served_model_name or model or str(llm.model_path)
            service = Service(llm, name, read_sampling_defaults(llm.model_path))
            server = _Server(uvicorn.Config(
                make_app(service, api_key), http="h11", ws="none", lifespan="off", access_log=False,
                log_level="warning", server_header=False, timeout_graceful_shutdown=DRAIN_LIMIT_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ), service)  # fmt: skip
            gc.collect()
            gc.freeze()  # what is loaded stays: a full collection would look at all of it, and the loop would wait
            return asyncio.run(server.run_until_end(listener))
    except (MinisglError, TypeError, ValueError) as error:
        return _fail(str(error), EXIT_START if isinstance(error, MinisglError) else EXIT_USAGE)
    finally:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded, so that a clash shows at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # two that only bind may both succeed
    except BaseException:
        listener.close()
        raise
    return listener


def read_sampling_defaults(model_path: Path) -> dict[str, Any]:
    """OpenAI's defaults, then what the model's generation_config.json says. Raises ModelLoadError."""
    defaults: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    file = model_path / "generation_config.json"
    if not file.is_file():
        return defaults
    try:
        values = json.loads(file.read_text())
        defaults |= {name: values[name] for name in DEFAULT_NAMES if values.get(name) is not None}
        if values.get("do_sample") is False:
            defaults["temperature"] = 0.0
        SamplingParams(**defaults)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{file}: {error}") from None
    return defaults


class _Server(uvicorn.Server):
    """uvicorn's server with exit codes of ours, and an eye on the engine."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service
        self._exit_code = 0

    async def run_until_end(self, listener: socket.socket) -> int:
        """Serve; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        watchers = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._watch_loop())]
        try:
            await self.serve([listener])
        finally:
            for watcher in watchers:
                watcher.cancel()
        return self._exit_code

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        llm = self._service.llm
        host, port = sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
        print(
            f"minisgl serves {self._service.model_name} at {url}: {llm.kv_tokens} KV tokens, "
            f"context {llm.context_tokens} tokens, "
            f"{llm.kv_tokens / llm.context_tokens:.1f} requests of full length at once",
            file=sys.stderr,
            flush=True,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again at the end, and the exit code would not be 0."""
        yield

    def _end(self, number: int) -> None:
        """The first signal drains, the second ends at once."""
        if self.should_exit:
            self.force_exit = True
            self._exit_code = 128 + number
            for connection in list(self.server_state.connections):  # asyncio would wait for them
                connection.transport.abort()
        self._service.is_draining = True
        self.should_exit = True

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(ENGINE_CHECK_S)
            try:
                self._service.llm.check_alive()
            except MinisglError as error:
                logger.error("%s", error)
                self._exit_code = EXIT_CHILD_DIED
                self._service.is_draining = self.should_exit = True
                return

    async def _watch_loop(self) -> None:
        while True:
            due = time.monotonic() + LAG_CHECK_S
            await asyncio.sleep(LAG_CHECK_S)
            self._service.metrics.loop_lag.observe(time.monotonic() - due)


def _fail(text: str, code: int) -> int:
    print(f"minisgl: {text}", file=sys.stderr)
    return code
