"""What a connection hands to its callers (`Output`), and where they wait for it: a thread, or a coroutine."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from minisgl.core import FinishReason
from minisgl.errors import MinisglError


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one sample, or its end, or both."""

    request_id: int
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # set with the finish reason
    logprob_ids: Sequence[int] = ()  # k + 1 for each token: its own, then the k best
    logprob_values: Sequence[float] = ()
    error: MinisglError | None = None  # with finish reason ERROR


class Mailbox(Protocol):
    """Where the outputs of some samples go. Called on the connection's thread: must neither block nor raise."""

    def put(self, outputs: list[Output]) -> None: ...
    def fail(self, error: MinisglError) -> None: ...


def renew(error: MinisglError) -> MinisglError:
    """A copy to raise, as an exception that several threads raise would collect all their tracebacks."""
    return type(error)(*error.args)


class ThreadMailbox:
    """For a thread, which blocks in `take`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Output] | None] = SimpleQueue()
        self._error: MinisglError | None = None

    def put(self, outputs: list[Output]) -> None:
        self._queue.put(outputs)

    def fail(self, error: MinisglError) -> None:
        self._error = error
        self._queue.put(None)

    def take(self) -> list[Output]:
        """The next outputs, once there are some. Raises what ended the connection, after the outputs before it."""
        outputs = self._queue.get()
        if outputs is None:
            assert self._error is not None, "woken without outputs or an error"
            self._queue.put(None)  # for a later take
            raise renew(self._error)
        return outputs


class AsyncMailbox:
    """For a coroutine of the event loop that is running now."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: deque[list[Output]] = deque()
        self._error: MinisglError | None = None
        self._arrived = asyncio.Event()

    def put(self, outputs: list[Output]) -> None:
        self._outputs.append(outputs)
        self._wake()

    def fail(self, error: MinisglError) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[Output]:
        """As `ThreadMailbox.take`."""
        while not self._outputs:
            if self._error is not None:
                raise renew(self._error)
            self._arrived.clear()
            if not self._outputs and self._error is None:
                await self._arrived.wait()
        return self._outputs.popleft()

    def take_waiting(self) -> list[Output]:
        """All outputs that are there already, perhaps none."""
        outputs: list[Output] = []
        while self._outputs:  # the connection's thread appends meanwhile
            outputs += self._outputs.popleft()
        return outputs

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            pass  # the loop is closed: nobody waits
