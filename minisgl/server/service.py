"""Answers calls with an `LLM`: encodes off the event loop, admits, merges the streams of several prompts."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from minisgl.errors import Overloaded
from minisgl.llm import LLM
from minisgl.server.errors import ApiError, bad_request
from minisgl.server.metrics import Metrics
from minisgl.server.openai import Call, chat_logprobs, completion_logprobs, make_usage
from minisgl.streams import AsyncTextStream

MAX_UNREAD_DELTAS = 256  # of the prompts of one call, merged and not written so far
ENCODE_THREADS = 2


class Service:
    """One model behind a server. Belongs to the event loop.

    Args:
        defaults: sampling options of requests that do not state them.
    """

    def __init__(self, llm: LLM, model_name: str, defaults: dict[str, Any]):
        self.llm, self.model_name, self.defaults = llm, model_name, defaults
        self.metrics = Metrics()
        self.is_draining = False
        self.created = int(time.time())
        self._num_samples = 0  # admitted and not ended
        self._encoders = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="minisgl-encode")

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Call something slow on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, function, *arguments)

    def check_model(self, name: object) -> None:
        """Raises ApiError unless this is the model that is served."""
        if not isinstance(name, str):
            raise bad_request(f"model must be a string, got {name!r:.60}", "model")
        if name != self.model_name:
            raise ApiError(
                404, f"the model {name[:100]!r} does not exist; {self.model_name!r} is served", param="model",
                code="model_not_found",
            )  # fmt: skip

    def admit(self, call: Call) -> "Answer":
        """Keep room for a call until its answer is closed. Raises ApiError, MinisglError."""
        num_samples = len(call.prompts) * call.params.n
        if num_samples > self.llm.window:
            raise bad_request(f"{num_samples} samples asked for at once, limit {self.llm.window}", "n")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.llm.check_alive()
        if self._num_samples + num_samples > self.llm.window:
            raise Overloaded(f"{self._num_samples} requests are running or waiting, limit {self.llm.window}")
        self._num_samples += num_samples
        return Answer(self, call, num_samples)

    def end(self, num_samples: int) -> None:
        self._num_samples -= num_samples

    async def encode(self, call: Call) -> Sequence[Sequence[int]]:
        """The ids of each prompt. Raises ApiError where one is too long, and InvalidRequest."""
        prompts = await self._encode(call)
        for i, ids in enumerate(prompts):
            if len(ids) >= self.llm.context_tokens:
                raise bad_request(
                    f"prompt {i} has {len(ids)} tokens; the context of {self.llm.context_tokens} tokens holds "
                    f"prompt and answer, so {self.llm.context_tokens - 1} is the limit",
                    "messages" if call.is_chat else "prompt",
                    "context_length_exceeded",
                )
        return prompts

    async def _encode(self, call: Call) -> Sequence[Sequence[int]]:
        if call.is_chat:
            return [await self.run(self.llm.encode_chat, call.prompts[0], call.template_options)]
        if isinstance(call.prompts[0], str):
            encoded: list[list[int]] = await self.run(self.llm.encode, call.prompts)
            return encoded
        return call.prompts


@dataclass
class Answer:
    """A call that was admitted. `send` it, read its deltas once, then `close` it, in any case."""

    service: Service
    call: Call
    num_samples: int
    num_prompt_tokens: int = 0
    streams: list[AsyncTextStream] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    _is_closed: bool = False
    _num_characters: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.call.is_chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self.started = time.monotonic()

    async def send(self) -> None:
        """Encode the prompts, check them and send them. Raises ApiError, MinisglError."""
        for ids in await self.service.encode(self.call):
            self.num_prompt_tokens += len(ids)
            self.streams.append(self.service.llm.agenerate(ids, self.call.params))

    async def deltas(self) -> AsyncIterator[dict[str, Any]]:
        """Deltas as `AsyncTextStream` gives them, but with `index` among all samples of the call."""
        async for delta in self._merged():
            if not self.num_tokens and delta["token_ids"]:
                self.service.metrics.first_token.observe(time.monotonic() - self.started)
            self.num_tokens += len(delta["token_ids"])
            if delta["finish_reason"] is not None:
                if delta["finish_reason"] == "stop" and delta["stop_reason"] is None:
                    self.num_tokens += 1  # the end id, which was generated and is not shown
                self._note_cached(delta)
            yield delta

    def close(self) -> None:
        """Abort what still runs. Harmless when repeated."""
        if not self._is_closed:
            self._is_closed = True
            for stream in self.streams:
                stream.close()
            self.service.end(self.num_samples)

    def usage(self) -> dict[str, Any]:
        return make_usage(self.num_prompt_tokens, self.num_tokens, self.num_cached_tokens)

    def logprobs(self, delta: dict[str, Any]) -> dict[str, Any] | None:
        """The log-probabilities of one delta, in the shape of the call's kind."""
        if self.call.params.logprobs is None:
            return None
        get_bytes = self.service.llm.decoder.get_bytes
        if self.call.is_chat:
            return chat_logprobs(delta["logprobs"], get_bytes)
        offset = self._num_characters.get(delta["index"], 0)
        self._num_characters[delta["index"]] = offset + len(delta["text"])
        return completion_logprobs(delta["logprobs"], get_bytes, offset)

    def _note_cached(self, delta: dict[str, Any]) -> None:
        if delta["index"] % self.call.params.n == 0:
            self.num_cached_tokens += delta["cached_tokens"]

    async def _merged(self) -> AsyncIterator[dict[str, Any]]:
        if len(self.streams) == 1:
            while joined := await self.streams[0].take_joined():
                for delta in joined:
                    yield delta
            return
        queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue(MAX_UNREAD_DELTAS)
        tasks = [asyncio.create_task(self._pump(i, stream, queue)) for i, stream in enumerate(self.streams)]
        try:
            num_left = len(tasks)
            while num_left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _pump(
        self, number: int, stream: AsyncTextStream, queue: "asyncio.Queue[dict[str, Any] | BaseException | None]"
    ) -> None:
        try:
            while joined := await stream.take_joined():
                for delta in joined:
                    await queue.put({**delta, "index": number * self.call.params.n + delta["index"]})
            await queue.put(None)
        except Exception as error:  # raised again by the reader
            await queue.put(error)
