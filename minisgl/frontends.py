"""The engine's side of its frontends: who is attached, what each is owed, and the outputs that wait for each."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import numpy as np

from minisgl import __version__
from minisgl.errors import InvalidRequest, Overloaded, ProtocolError
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
from minisgl.scheduler.request import Request, StepOutputs
from minisgl.scheduler.scheduler import Scheduler
from minisgl.transport import PeerGone, ServerChannel

logger = logging.getLogger(__name__)

LEASE_S = 3.5  # a frontend pings each second; silent for this long it counts as gone
LATE_S = 1.0  # a check that comes this late shows that we were paused ourselves
MAX_CLIENTS = 1024
MAX_SAMPLES = 16
MESSAGES_PER_TURN = 256


@dataclass(slots=True)
class _Client:
    """One attached frontend."""

    client_id: int
    address: bytes  # its routing id
    last_heard: float
    live: set[int] = field(default_factory=set)  # request ids without a terminal message
    replies: deque[Message] = field(default_factory=deque)
    outputs: list[StepOutputs] = field(default_factory=list)  # not sent so far; bounded by its admitted tokens
    next_sequence: int = 0


class Frontends:
    """All attached frontends. Nothing here blocks: what cannot be sent waits with its client."""

    def __init__(self, channel: ServerChannel, scheduler: Scheduler, welcome: Welcome, get_stats: Callable[[], Stats]):
        self._channel, self._scheduler, self._welcome, self._get_stats = channel, scheduler, welcome, get_stats
        self._by_address: dict[bytes, _Client] = {}
        self._by_id: dict[int, _Client] = {}
        self._next_client_id = 1
        self._last_check = time.monotonic()
        self.is_draining = False
        self.num_malformed = 0

    def receive(self, now: float) -> None:
        """Handle the messages that wait; of a flood only so many, as the workers wait meanwhile."""
        for _ in range(MESSAGES_PER_TURN):
            received = self._channel.receive()
            if received is None:
                return
            address, message = received
            client = self._by_address.get(address)
            if client is not None:
                client.last_heard = now
            if isinstance(message, ProtocolError):
                self.num_malformed += 1
                logger.warning("a frontend sent a malformed message (number %d): %s", self.num_malformed, message)
            elif isinstance(message, Hello):
                self._greet(address, message, now)
            elif client is None:
                self._reply_to_stranger(
                    address, "say Hello first; or you were silent for so long that you were given up"
                )
            else:
                self._handle(client, message)

    def route(self, outputs: StepOutputs) -> None:
        """Put each client's entries into its outbox."""
        if not len(outputs):
            return
        finished = np.flatnonzero(outputs.finish_reasons)
        owners, request_ids = outputs.client_ids[finished].tolist(), outputs.request_ids[finished].tolist()
        for client_id, request_id in zip(owners, request_ids, strict=True):
            if (client := self._by_id.get(client_id)) is not None:
                client.live.discard(request_id)
        for client_id in set(outputs.client_ids.tolist()) if len(self._by_id) > 1 else {int(outputs.client_ids[0])}:
            if (client := self._by_id.get(client_id)) is not None:
                client.outputs.append(_select(outputs, client_id))

    def flush(self) -> None:
        """Send what waits, each client's outputs as one message."""
        for client in list(self._by_id.values()):
            try:
                self._flush_client(client)
            except PeerGone:
                self._drop(client, "it is gone")

    def check(self, now: float) -> None:
        """Drop frontends that were silent for longer than their lease."""
        was_late = now - self._last_check > LATE_S
        self._last_check = now
        for client in list(self._by_id.values()):
            if was_late:
                client.last_heard = now
            elif now - client.last_heard > LEASE_S:
                self._drop(client, f"silent for {now - client.last_heard:.1f} s")

    def fail_all(self, text: str) -> None:
        """Tell every frontend that the engine ends because of a fault."""
        for client in self._by_id.values():
            client.replies.append(EngineFailed(text))
        self.flush()

    def abort_all(self) -> None:
        """End every request; each gets its terminal message."""
        for client in self._by_id.values():
            for request_id in sorted(client.live):
                self.route(self._scheduler.abort_request(client.client_id, request_id))

    @property
    def has_unsent(self) -> bool:
        return any(client.outputs or client.replies for client in self._by_id.values())

    def _greet(self, address: bytes, hello: Hello, now: float) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            self._reply_to_stranger(address, f"the engine speaks protocol {PROTOCOL_VERSION}")
            return
        if address not in self._by_address:
            if len(self._by_id) >= MAX_CLIENTS:
                self._reply_to_stranger(address, f"{MAX_CLIENTS} frontends are attached, which is the limit")
                return
            client = _Client(self._next_client_id, address, now)
            self._next_client_id += 1
            self._by_address[address] = self._by_id[client.client_id] = client
        self._by_address[address].replies.append(self._welcome)

    def _reply_to_stranger(self, address: bytes, text: str) -> None:
        try:
            self._channel.send(address, Refused(PROTOCOL_VERSION, __version__, text))
        except PeerGone:
            pass

    def _handle(self, client: _Client, message: Message) -> None:
        match message:
            case AddRequests():
                for new in message.requests:
                    self._add(client, new)
            case Abort():
                for request_id in np.frombuffer(message.request_ids, "<u8").tolist():
                    self.route(self._scheduler.abort_request(client.client_id, request_id))
            case Control(action=ControlAction.PING):
                client.replies.append(Pong(self._welcome.epoch, self._scheduler.stats().num_steps))
            case Control(action=ControlAction.STATS):
                client.replies.append(self._get_stats())
            case Control(action=ControlAction.GOODBYE):
                self._drop(client, "it said goodbye")
            case _:
                self.num_malformed += 1
                logger.warning("a frontend sent a %s, which is not for engines", type(message).__name__)

    def _add(self, client: _Client, new: NewRequest) -> None:
        """Admit one prompt with all its samples, or answer with Rejected."""
        try:
            if self.is_draining:
                raise _Draining("the engine is shutting down")
            requests = self._build(client, new)
            free = self._scheduler.config.max_queued_req - self._scheduler.stats().num_waiting
            if free < len(requests):
                raise Overloaded(f"the engine's queue is full ({self._scheduler.config.max_queued_req} requests)")
            for request in requests:
                self._scheduler.add_request(request)
        except (InvalidRequest, Overloaded, _Draining) as error:
            client.replies.append(Rejected(new.request_id, _REASONS[type(error)], str(error)))
            return
        client.live.update(request.request_id for request in requests)

    def _build(self, client: _Client, new: NewRequest) -> list[Request]:
        seeds = np.frombuffer(new.seeds, "<u8").tolist()
        sampling = new.sampling
        if not 1 <= len(seeds) <= MAX_SAMPLES:
            raise InvalidRequest(f"{len(seeds)} samples, expected 1 to {MAX_SAMPLES}")
        if any(new.request_id + i in client.live for i in range(len(seeds))):
            raise InvalidRequest(f"request id {new.request_id} is in use")
        if len(sampling.bias_ids) != len(sampling.bias_values):
            raise InvalidRequest("logit_bias has not as many values as token ids")
        ids = np.concatenate([np.frombuffer(sampling.bias_ids, "<i4"), np.frombuffer(sampling.stop_ids, "<i4")])
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._welcome.vocab_size:
            raise InvalidRequest(f"stop or bias token ids must be below the vocabulary's {self._welcome.vocab_size}")
        prompt_ids = np.frombuffer(new.prompt_ids, "<i4").astype(np.int32)
        return [
            Request(client.client_id, new.request_id + i, prompt_ids, new.max_tokens, sampling, seed, new.stream)
            for i, seed in enumerate(seeds)
        ]

    def _flush_client(self, client: _Client) -> None:
        while client.replies:
            if not self._channel.send(client.address, client.replies[0]):
                return
            client.replies.popleft()
        if client.outputs and self._channel.send(client.address, _pack(client.outputs, client.next_sequence)):
            client.next_sequence += 1
            client.outputs.clear()

    def _drop(self, client: _Client, reason: str) -> None:
        logger.info("frontend %d left: %s; aborting its %d requests", client.client_id, reason, len(client.live))
        del self._by_id[client.client_id], self._by_address[client.address]
        self._scheduler.abort_client(client.client_id)


class _Draining(Exception):
    pass


_REASONS: dict[type[Exception], RejectReason] = {
    InvalidRequest: RejectReason.INVALID,
    Overloaded: RejectReason.OVERLOADED,
    _Draining: RejectReason.DRAINING,
}


def _select(outputs: StepOutputs, client_id: int) -> StepOutputs:
    """The entries of one client."""
    mine = outputs.client_ids == client_id
    if mine.all():
        return outputs
    tokens = np.repeat(mine, outputs.num_tokens)
    logprobs = np.repeat(mine, outputs.num_logprobs)
    failed = np.flatnonzero(outputs.finish_reasons == 4).tolist()
    return StepOutputs(
        client_ids=outputs.client_ids[mine],
        request_ids=outputs.request_ids[mine],
        num_tokens=outputs.num_tokens[mine],
        finish_reasons=outputs.finish_reasons[mine],
        cached_tokens=outputs.cached_tokens[mine],
        tokens=outputs.tokens[tokens],
        errors=tuple(text for row, text in zip(failed, outputs.errors, strict=True) if mine[row]),
        num_logprobs=outputs.num_logprobs[mine],
        logprob_ids=outputs.logprob_ids[logprobs],
        logprob_values=outputs.logprob_values[logprobs],
    )


def _pack(pending: list[StepOutputs], sequence: int) -> Outputs:
    """One message for everything that waits, in order."""

    def column(name: str) -> bytes:
        parts = [getattr(outputs, name) for outputs in pending]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).tobytes()

    def errors() -> Iterator[str]:
        for outputs in pending:
            yield from outputs.errors

    names = {f.name for f in fields(Outputs)} - {"sequence", "errors"}
    return Outputs(sequence=sequence, errors=tuple(errors()), **{name: column(name) for name in names})
