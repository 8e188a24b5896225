"""What a connection hands to its callers (`Output`), and where they wait for it: a thread, or a coroutine."""

import asyncio
import weakref
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from minisgl.core import FinishReason
from minisgl.errors import MinisglError

TURNS_PER_ROUND = 16


class Output(NamedTuple):  # made for every row of every step: a frozen dataclass takes three times as long
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
    """For a coroutine of the event loop of `turns`."""

    def __init__(self, turns: "Turns") -> None:
        self._turns = turns
        self._outputs: deque[Output] = deque()
        self._error: MinisglError | None = None
        self.is_due = False
        self.turn = asyncio.Event()  # set when there is something to take and it is this mailbox's turn

    def put(self, outputs: list[Output]) -> None:
        self._outputs.extend(outputs)
        self._turns.add(self)

    def fail(self, error: MinisglError) -> None:
        self._error = error
        self._turns.add(self)

    async def take(self, max_tokens: int) -> list[Output]:
        """The next output once there is one, and those after it as long as there are fewer tokens than that.

        Raises as `ThreadMailbox.take`.
        """
        await self.turn.wait()
        error = self._error  # before the outputs are looked at, as the other thread may add some and then fail
        taken: list[Output] = []
        num_tokens = 0
        while self._outputs and (not taken or num_tokens < max_tokens):
            taken.append(self._outputs.popleft())
            num_tokens += len(taken[-1].token_ids)
        if not taken and error is not None:
            raise renew(error)
        self.turn.clear()
        if self._outputs or self._error is not None:
            self._turns.add(self)
        return taken


class Turns:
    """Gives the mailboxes of one event loop their turns, a few in each round of the loop.

    However many readers have something to take, whatever else the loop has to do waits for a few of them only. A round
    is asked for with one system call, not with one for each mailbox.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)  # who keeps one of us for each loop does not keep the loop
        self._due: deque[AsyncMailbox] = deque()
        self._is_scheduled = False

    def add(self, mailbox: AsyncMailbox) -> None:
        """Give it a turn after those that are due. May be called on any thread."""
        loop = self._loop()
        if loop is None:
            return
        # Both flags are cleared before what they stand for is looked at: who finds one set is seen.
        if not mailbox.is_due:
            mailbox.is_due = True
            self._due.append(mailbox)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            loop.call_soon_threadsafe(self._run_round)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    def _run_round(self) -> None:
        self._is_scheduled = False
        for _ in range(min(TURNS_PER_ROUND, len(self._due))):
            mailbox = self._due.popleft()
            mailbox.is_due = False
            mailbox.turn.set()
        loop = self._loop()
        if self._due and loop is not None and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._run_round)
