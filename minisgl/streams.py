"""Requests whose text arrives piece by piece: `LLM.stream` for threads, `LLM.agenerate` for coroutines."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from minisgl.batch_call import describe_sample
from minisgl.client import EngineClient
from minisgl.completion import Completion, Delta
from minisgl.core import SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.errors import MinisglError
from minisgl.mailbox import AsyncMailbox, Mailbox, Output, ThreadMailbox
from minisgl.outputs import join_outputs
from minisgl.request_builder import RequestBuilder

MAX_JOINED_TOKENS = 32  # what one turn of the loop does for one reader is bounded, so that the others wait little


class RequestStream:
    """What both kinds of stream share: one request, its samples, and their deltas in the order of arrival.

    A delta is a dict with `text`, `token_ids`, `finish_reason` (None until a sample's last), `index` of the sample, and
    `logprobs` when asked for; the last of a sample also has `stop_reason`, `prompt_tokens` and `cached_tokens`.
    """

    def __init__(
        self,
        client: EngineClient,
        builder: RequestBuilder,
        decoder: TextDecoder | None,
        prompt_ids: bytes,
        params: SamplingParams,
        mailbox: Mailbox,
    ):
        self.request_id = client.make_request_ids(params.n)
        self._client, self._params = client, params
        self._num_prompt_tokens = len(prompt_ids) // 4
        self._completions = {self.request_id + i: Completion(params, decoder) for i in range(params.n)}
        self._stopped: set[int] = set()  # ended by a stop string; the engine's own end is awaited
        self._deltas: deque[dict[str, Any]] = deque()
        self._failure: MinisglError | None = None  # told once the deltas before it are taken
        client.submit([builder.build(self.request_id, prompt_ids, params, stream=True)], mailbox)

    def abort(self) -> None:
        """End the request early: its last delta comes with the finish reason "abort"."""
        self._client.abort(self._completions)

    def close(self) -> None:
        """Abort what still runs, without waiting for its end. Harmless when repeated."""
        if self._completions:
            self._client.abort(self._completions, discard=True)
            self._completions = {}

    def __del__(self) -> None:
        if getattr(self, "_completions", None):
            self.close()

    @property
    def is_finished(self) -> bool:
        """Whether no sample has anything more to come."""
        return not self._completions and not self._deltas and self._failure is None

    def _raise_failure(self) -> None:
        """Raise what ended the request, once."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _add(self, outputs: list[Output]) -> None:
        for output in outputs:
            completion = self._completions.get(output.request_id)
            if completion is None:
                continue  # closed meanwhile
            if output.error is not None:
                self.close()
                self._failure = output.error
                return
            delta = completion.add(output)
            if completion.is_finished:
                del self._completions[output.request_id]
            elif completion.must_abort and output.request_id not in self._stopped:
                self._stopped.add(output.request_id)
                self._client.abort([output.request_id])
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                self._deltas.append(self._describe(output.request_id - self.request_id, delta))

    def _describe(self, index: int, delta: Delta) -> dict[str, Any]:
        if delta.finish_reason is not None:
            return {**describe_sample(delta, self._params, self._num_prompt_tokens), "index": index}
        described: dict[str, Any] = {
            "text": delta.text,
            "token_ids": delta.token_ids,
            "finish_reason": None,
            "index": index,
        }
        if self._params.logprobs is not None:
            described["logprobs"] = delta.logprobs
        return described


class TextStream(RequestStream, Iterator[dict[str, Any]]):
    """Iterator of deltas. Leaving it early, or `close`, aborts the request."""

    def __init__(
        self,
        client: EngineClient,
        builder: RequestBuilder,
        decoder: TextDecoder | None,
        prompt_ids: bytes,
        params: SamplingParams,
    ):
        self._mailbox = ThreadMailbox()
        super().__init__(client, builder, decoder, prompt_ids, params, self._mailbox)

    def __next__(self) -> dict[str, Any]:
        while not self._deltas:
            self._raise_failure()
            if self.is_finished:
                raise StopIteration
            self._add(self._mailbox.take())
        return self._deltas.popleft()


class AsyncTextStream(RequestStream, AsyncIterator[dict[str, Any]]):
    """Asynchronous iterator of deltas, for the event loop in which it was made. Leaving it early aborts the request."""

    def __init__(
        self,
        client: EngineClient,
        builder: RequestBuilder,
        decoder: TextDecoder | None,
        prompt_ids: bytes,
        params: SamplingParams,
    ):
        self._mailbox = AsyncMailbox(client.get_turns())
        super().__init__(client, builder, decoder, prompt_ids, params, self._mailbox)

    async def __anext__(self) -> dict[str, Any]:
        while not self._deltas:
            self._raise_failure()
            if self.is_finished:
                raise StopAsyncIteration
            self._add(await self._mailbox.take(max_tokens=1))
        return self._deltas.popleft()

    async def take_joined(self) -> list[dict[str, Any]]:
        """Wait for deltas, then take those that are there, joined to one for each sample. Empty at the end.

        A reader that falls behind so gets fewer and longer deltas, and lets the loop's other tasks run between them.
        """
        while not self._deltas:
            self._raise_failure()
            if self.is_finished:
                return []
            self._add(join_outputs(await self._mailbox.take(MAX_JOINED_TOKENS)))
        deltas = list(self._deltas)
        self._deltas.clear()
        return deltas

    async def aclose(self) -> None:
        """As `close`, for those who treat it as an asynchronous generator."""
        self.close()
