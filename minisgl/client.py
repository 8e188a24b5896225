"""One frontend's connection to an engine, shared by all threads of a program.

A thread of its own owns the socket. Callers hand it requests, and get `Output`s back through a `Mailbox`:

    submit -> wait for the window -> AddRequests -> engine -> Outputs or Rejected -> Mailbox.put

Every submitted sample gets exactly one terminal `Output`, or its mailbox is told the error that ended the connection.
That error is sticky. Nobody waits for ever: the engine's end is seen at once, and its silence after `LEASE_S`.
"""

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from minisgl.connection import Child, Command, Connection
from minisgl.errors import DeadlineExceeded, EngineDead, EngineUnreachable, MinisglError
from minisgl.mailbox import Mailbox, Turns, renew
from minisgl.protocol import NewRequest, Stats, Welcome
from minisgl.transport import Waker, check_address

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class EngineClient:
    """Connects when built, and stays connected until `close` or the engine's end.

    Args:
        child: the engine's process, if it was started from here; its end is then seen at once.

    Raises:
        EngineUnreachable: nobody answered within `connect_timeout_s`.
        ProtocolMismatch: the engine speaks another version.
        EngineDead: the engine's process ended instead of answering.
    """

    def __init__(self, address: str, *, child: Child | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S):
        check_address(address)
        self.address = address
        self._process_id = os.getpid()
        self._id_lock = threading.Lock()
        self._next_request_id = 1
        self._failure: MinisglError | None = None
        self._commands: deque[Command] = deque()
        self._waker = Waker()
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = weakref.WeakKeyDictionary()
        welcome: Future[Welcome] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(child, connect_timeout_s, welcome), name="minisgl-client", daemon=True
        )
        self._thread.start()
        try:
            self.welcome = welcome.result(connect_timeout_s + CLOSE_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def make_request_ids(self, num_samples: int) -> int:
        """Reserve ids for the samples of one request and return the first."""
        with self._id_lock:
            first = self._next_request_id
            self._next_request_id += num_samples
        return first

    def submit(self, requests: Sequence[NewRequest], mailbox: Mailbox) -> None:
        """Send requests as soon as the window has room. Raises the error that ended the connection, if one did."""
        self._post(lambda connection: connection.accept(requests, mailbox))

    def get_turns(self) -> Turns:
        """The one of the event loop that is running now."""
        loop = asyncio.get_running_loop()
        turns = self._turns.get(loop)
        if turns is None:
            for closed in [other for other in self._turns if other.is_closed()]:
                del self._turns[closed]  # readers that were due when it closed keep it
            turns = self._turns[loop] = Turns(loop)
        return turns

    def abort(self, request_ids: Iterable[int], *, discard: bool = False) -> None:
        """End samples early; ids that are unknown or finished are ignored.

        Args:
            discard: their mailbox hears nothing more of them. Otherwise their terminal `Output` still comes.
        """
        if self._failure is None and os.getpid() == self._process_id:
            ids = frozenset(request_ids)
            self._commands.append(lambda connection: connection.abort(ids, discard))
            self._waker.wake()

    def get_stats(self) -> Stats:
        """Ask the engine. Raises DeadlineExceeded after `STATS_TIMEOUT_S`."""
        answer: Future[Stats] = Future()
        self._post(lambda connection: connection.ask_stats(answer))
        try:
            return answer.result(STATS_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer within {STATS_TIMEOUT_S:g} s") from None

    def check_alive(self) -> None:
        """Raise what ended the connection, or that this is a forked child, which has none."""
        if os.getpid() != self._process_id:
            raise EngineUnreachable(
                f"this engine's connection belongs to process {self._process_id}; process {os.getpid()}, forked from "
                "it, must start an engine or attach to one itself"
            )
        if self._failure is not None:
            raise renew(self._failure)

    def close(self) -> None:
        """Say goodbye and end the thread; what is outstanding fails. Harmless when repeated or after the end."""
        if os.getpid() != self._process_id:
            return
        self._commands.append(lambda connection: connection.close())
        self._waker.wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may call us anywhere
            self._thread.join(CLOSE_TIMEOUT_S)

    def _post(self, command: Command) -> None:
        """Run `command` on the thread. Takes no lock, as the garbage collector may call `abort` in the midst of it."""
        self._commands.append(command)
        self._waker.wake()
        # The thread sets the failure before it looks at the commands for the last time: one of us has seen the other.
        self.check_alive()

    def _run(self, child: Child | None, connect_timeout_s: float, welcome: "Future[Welcome]") -> None:
        connection: Connection | None = None
        error: MinisglError
        try:
            connection = Connection(self.address, child, self._commands, self._waker)
            welcome.set_result(connection.connect(connect_timeout_s))
            connection.serve()
            error = EngineDead("the connection to the engine was closed")
        except MinisglError as caught:
            error = caught
        except Exception as caught:
            logger.exception("the connection's thread failed")
            error = EngineDead(f"the connection's thread failed: {type(caught).__name__}: {caught}")
        self._failure = error
        if connection is not None:
            connection.fail(error)
        if not welcome.done():
            welcome.set_exception(error)
        self._waker.close()
