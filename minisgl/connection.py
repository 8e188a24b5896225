"""The thread side of `EngineClient`: the socket, what is outstanding on it, and when the engine counts as gone."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from minisgl import __version__
from minisgl.core import FinishReason
from minisgl.errors import (
    EngineDead,
    EngineUnreachable,
    InvalidRequest,
    MinisglError,
    Overloaded,
    ProtocolError,
    ProtocolMismatch,
)
from minisgl.mailbox import Mailbox, Output, renew
from minisgl.outputs import split_outputs
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AddRequests,
    Control,
    ControlAction,
    EngineFailed,
    Hello,
    Message,
    NewRequest,
    Outputs,
    Pong,
    Refused,
    Rejected,
    RejectReason,
    Stats,
    Welcome,
)
from minisgl.transport import ChannelBlocked, ClientChannel, Readiness, Waker, make_context

PING_INTERVAL_S = 1.0
LEASE_S = 3.5  # silence after which the other side counts as gone
LATE_S = 1.0  # a turn that comes this late shows that we were paused ourselves
CHILD_CHECK_INTERVAL_S = 0.25  # where the system has no pidfd
LAST_WORDS_S = 0.1  # how long to look for a dead engine's last message, which names the cause
GOODBYE_LINGER_MS = 500
MESSAGES_PER_TURN = 64
REST_SHARE = 3.0  # of the time that a turn took: the threads that read what it delivered need the interpreter too
REST_LIMIT_S = 0.02
BATCH_REQUESTS = 1024  # of one AddRequests
BATCH_BYTES = 4 * 2**20
REJECTIONS: dict[int, type[MinisglError]] = {
    RejectReason.INVALID: InvalidRequest,
    RejectReason.OVERLOADED: Overloaded,
    RejectReason.DRAINING: EngineUnreachable,
}


class Child(Protocol):
    """What the connection needs of the engine's process, when it was started from here."""

    @property
    def pidfd(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def describe_exit(self) -> str: ...


@dataclass(slots=True)
class _Live:
    """A sample that the engine owes a terminal message."""

    mailbox: Mailbox | None  # None: nobody wants its outputs any more
    num_logprob_items: int  # for each token


class Connection:
    """Everything here runs on one thread; other threads append to `commands` and wake it."""

    def __init__(self, address: str, child: Child | None, commands: "deque[Command]", waker: Waker):
        self._address, self._child, self._commands, self._waker = address, child, commands, waker
        self._context = make_context()
        self._channel = ClientChannel(self._context, address)
        self._pidfd = child.pidfd if child is not None else None
        pidfds = [self._pidfd] if self._pidfd is not None else []
        self._readiness = Readiness([self._channel.pollable, waker.pollable, *pidfds])
        self._live: dict[int, _Live] = {}
        self._num_samples: dict[int, int] = {}  # of requests with several, by their first id
        self._waiting: deque[tuple[NewRequest, Mailbox]] = deque()  # for room in the window
        self._outbox: deque[Message] = deque()
        self._stats_calls: deque[Future[Stats]] = deque()
        self._failure: MinisglError | None = None
        self._is_closing = False
        self._next_sequence = 0
        self._unread: list[Outputs] = []
        self._welcome: Welcome | None = None

    # ------------------------------------------------------------------------------------------------- commands

    def accept(self, requests: Sequence[NewRequest], mailbox: Mailbox) -> None:
        """Queue requests for the window."""
        if self._failure is not None:
            mailbox.fail(self._failure)
        else:
            self._waiting.extend((request, mailbox) for request in requests)

    def abort(self, request_ids: frozenset[int], discard: bool) -> None:
        """See `EngineClient.abort`. A request that still waits ends here when all its samples are named."""
        kept: deque[tuple[NewRequest, Mailbox]] = deque()
        for request, mailbox in self._waiting:
            samples = range(request.request_id, request.request_id + len(request.seeds) // 8)
            if not request_ids.issuperset(samples):
                kept.append((request, mailbox))
            elif not discard:
                mailbox.put([Output(sample, (), FinishReason.ABORT) for sample in samples])
        self._waiting = kept
        found = [request_id for request_id in request_ids if request_id in self._live]
        if discard:
            for request_id in found:
                self._live[request_id].mailbox = None
        if found:
            self._outbox.append(Abort(array("Q", sorted(found)).tobytes()))

    def ask_stats(self, answer: "Future[Stats]") -> None:
        """Have `answer` set by the next Stats message that is not another call's."""
        if self._failure is not None:
            answer.set_exception(renew(self._failure))
        else:
            self._stats_calls.append(answer)
            self._outbox.append(Control(ControlAction.STATS))

    def close(self) -> None:
        """Leave the loop at the end of this turn."""
        self._is_closing = True

    def fail(self, error: MinisglError) -> None:
        """Close the socket and tell everyone who waits, now or from now on, that there will be nothing more."""
        self._context.destroy(GOODBYE_LINGER_MS if self._is_closing else 0)
        self._failure = error
        self._run_commands()
        mailboxes = {live.mailbox for live in self._live.values()} | {mailbox for _, mailbox in self._waiting}
        for mailbox in mailboxes - {None}:
            assert mailbox is not None
            mailbox.fail(error)
        for answer in self._stats_calls:
            answer.set_exception(renew(error))

    # ----------------------------------------------------------------------------------------------------- loop

    def connect(self, timeout_s: float) -> Welcome:
        """Greet the engine and wait for its answer. Raises as `EngineClient` says."""
        deadline = time.monotonic() + timeout_s
        self._outbox.append(Hello(PROTOCOL_VERSION, __version__))
        while self._welcome is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineUnreachable(f"no engine answered at {self._address} within {timeout_s:g} s")
            self._turn(min(left_s, CHILD_CHECK_INTERVAL_S))
            if self._is_closing:
                raise EngineUnreachable(f"the connection to {self._address} was given up before the engine answered")
        return self._welcome

    def serve(self) -> None:
        """Carry messages until `close`. Raises EngineDead."""
        interval_s = PING_INTERVAL_S if self._child is None or self._pidfd is not None else CHILD_CHECK_INTERVAL_S
        self._last_heard = self._last_turn = self._next_ping = time.monotonic()
        while not self._is_closing:
            self._turn(interval_s)
            self._watch(time.monotonic(), interval_s)
        self._outbox.append(Control(ControlAction.GOODBYE))
        self._flush()

    def _turn(self, wait_s: float) -> None:
        self._flush()
        ready = self._readiness.wait(wait_s)
        started = time.monotonic()
        self._waker.clear()
        self._run_commands()
        is_gone = self._pidfd in ready or (
            self._child is not None and self._pidfd is None and self._child.poll() is not None
        )
        try:
            if is_gone:
                while self._receive(LAST_WORDS_S):
                    pass
            else:  # not without end: an engine that is faster than we are must still get our pings and aborts
                for _ in range(MESSAGES_PER_TURN):
                    if not self._receive():
                        break
        finally:  # whatever else came, these came before it
            has_outputs = bool(self._unread)
            if has_outputs:
                self._deliver()
        if is_gone:
            assert self._child is not None
            raise EngineDead(f"the engine ended: {self._child.describe_exit()}")
        self._fill_window()
        if has_outputs:
            time.sleep(min(REST_SHARE * (time.monotonic() - started), REST_LIMIT_S))

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()(self)

    def _watch(self, now: float, interval_s: float) -> None:
        """Ping, and judge the engine's silence; but not when we were paused ourselves and had no chance to listen."""
        if now - self._last_turn > interval_s + LATE_S:
            self._last_heard = now
        self._last_turn = now
        if now - self._last_heard > LEASE_S:
            raise EngineDead(f"the engine at {self._address} has not answered for {now - self._last_heard:.1f} s")
        if now >= self._next_ping:
            self._next_ping = now + PING_INTERVAL_S
            if not self._outbox:
                self._outbox.append(Control(ControlAction.PING))

    def _flush(self) -> None:
        """Send what can be sent. An engine that stopped reading is caught by its silence."""
        while self._outbox:
            try:
                self._channel.send(self._outbox[0])
            except ChannelBlocked:
                return
            self._outbox.popleft()

    def _fill_window(self) -> None:
        """Move waiting requests to the engine while fewer samples are outstanding than its window allows."""
        if self._welcome is None:
            return
        batch: list[NewRequest] = []
        num_bytes = 0
        while self._waiting:
            request, mailbox = self._waiting[0]
            num_samples = len(request.seeds) // 8
            if self._live and len(self._live) + num_samples > self._welcome.window:
                break
            self._waiting.popleft()
            num_logprobs = request.sampling.num_logprobs
            for i in range(num_samples):
                self._live[request.request_id + i] = _Live(mailbox, 0 if num_logprobs is None else num_logprobs + 1)
            if num_samples > 1:
                self._num_samples[request.request_id] = num_samples
            batch.append(request)
            num_bytes += len(request.prompt_ids)
            if len(batch) == BATCH_REQUESTS or num_bytes > BATCH_BYTES:
                self._outbox.append(AddRequests(tuple(batch)))
                batch, num_bytes = [], 0
        if batch:
            self._outbox.append(AddRequests(tuple(batch)))
        self._flush()

    # ------------------------------------------------------------------------------------------------- messages

    def _receive(self, timeout_s: float = 0.0) -> bool:
        """Handle the next message; False when none came."""
        try:
            message = self._channel.receive(timeout_s)
        except ProtocolError as error:
            if self._welcome is None:
                raise ProtocolMismatch(
                    f"{self._address} does not speak protocol {PROTOCOL_VERSION} (minisgl {__version__}): {error}"
                ) from None
            raise EngineDead(f"the engine at {self._address} sent what is not a message: {error}") from None
        if message is None:
            return False
        self._last_heard = time.monotonic()
        self._handle(message)
        return True

    def _handle(self, message: Message) -> None:
        match message:
            case Outputs():
                self._note_sequence(message.sequence)
                self._unread.append(message)
            case Rejected():
                self._reject(message)
            case Stats():
                if self._stats_calls:
                    self._stats_calls.popleft().set_result(message)
            case Welcome():
                self._check_epoch(message.epoch)
                self._welcome = message
            case Pong():
                self._check_epoch(message.epoch)
            case EngineFailed():
                raise EngineDead(message.text)
            case Refused():
                raise self._explain_refusal(message)
            case _:
                raise EngineDead(f"the engine sent a {type(message).__name__}, which is not for frontends")

    def _note_sequence(self, sequence: int) -> None:
        if sequence != self._next_sequence:
            raise EngineDead(
                f"message {self._next_sequence} of the engine at {self._address} was lost (the next is {sequence}), "
                "so the text of its requests is not complete"
            )
        self._next_sequence += 1

    def _check_epoch(self, epoch: int) -> None:
        if self._welcome is not None and epoch != self._welcome.epoch:
            raise EngineDead(f"the engine at {self._address} was replaced by another one; attach again")

    def _explain_refusal(self, message: Refused) -> MinisglError:
        if message.protocol_version != PROTOCOL_VERSION:
            return ProtocolMismatch(
                f"the engine at {self._address} speaks protocol {message.protocol_version} (minisgl "
                f"{message.package_version}), this program protocol {PROTOCOL_VERSION} (minisgl {__version__})"
            )
        kind = EngineUnreachable if self._welcome is None else EngineDead
        return kind(f"the engine at {self._address} refused this program: {message.text}")

    def _reject(self, message: Rejected) -> None:
        error = REJECTIONS[message.reason](message.text)
        num_samples = self._num_samples.pop(message.request_id, 1)
        for request_id in range(message.request_id, message.request_id + num_samples):
            live = self._live.pop(request_id, None)
            if live is not None and live.mailbox is not None:
                live.mailbox.put([Output(request_id, (), FinishReason.ERROR, error=error)])

    def _deliver(self) -> None:
        """Hand out what the messages of this turn hold, to each mailbox at once."""
        messages, self._unread = self._unread, []
        letters: dict[Mailbox, list[Output]] = {}
        try:
            for output in split_outputs(messages, lambda request_id: self._live[request_id].num_logprob_items):
                live = self._live[output.request_id]
                if output.finish_reason is not None:
                    del self._live[output.request_id]
                    self._num_samples.pop(output.request_id, None)
                if live.mailbox is not None:
                    letters.setdefault(live.mailbox, []).append(output)
        except (LookupError, ValueError) as error:
            raise EngineDead(f"the engine sent outputs that make no sense: {type(error).__name__}: {error}") from None
        for mailbox, outputs in letters.items():
            mailbox.put(outputs)


Command = Callable[[Connection], None]
