"""An engine without a model, on a thread of the test: real socket, real messages, faults on demand.

Every request is answered with the numbers that follow the last id of its prompt (7 -> 8, 9, 10, ...), one per turn of
the loop; stop ids and max_tokens end it.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from waiting import wait_until

from minisgl.core import FinishReason, SamplingParams
from minisgl.protocol import (
    Abort,
    AddRequests,
    Control,
    ControlAction,
    Hello,
    Message,
    NewRequest,
    Outputs,
    Pong,
    Refused,
    Rejected,
    Stats,
    Welcome,
)
from minisgl.transport import PeerGone, Readiness, ServerChannel, make_context

VOCAB = 320
TURN_S = 0.001


@dataclass
class Running:
    request: NewRequest
    index: int
    last: int
    num_generated: int = 0

    @property
    def request_id(self) -> int:
        return self.request.request_id + self.index


class FakeEngine:
    """Public attributes are the script of a test; they may be changed while it runs.

    Args:
        reject: what to answer to a request instead of serving it, or None.
    """

    def __init__(self, address: str, *, model: str = "fake", window: int = 8, context_limit_tokens: int = 512):
        self.address, self.model = address, model
        self.window, self.context_limit_tokens = window, context_limit_tokens
        self.epoch = 17
        self.reject: Callable[[NewRequest], Rejected | None] = lambda request: None
        self.refuse: Refused | None = None
        self.is_silent = False
        self.is_paused = False  # answers, but makes no tokens
        self.flood: Outputs | None = None  # sent again and again, as fast as the client takes it
        self.sequence_step = 1
        self.num_cached_tokens = 0
        self.received: list[Message] = []
        self.max_outstanding = 0
        self.running: dict[int, Running] = {}
        self._extra: list[Message] = []
        self._client: bytes = b""
        self._sequence = 0
        self._is_closing = False
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(10), "the fake engine could not bind"

    def send(self, *messages: Message) -> None:
        """Have the engine send these to the newest client."""
        self._extra.extend(messages)

    def requests(self) -> list[NewRequest]:
        return [
            request for message in self.received if isinstance(message, AddRequests) for request in message.requests
        ]

    def aborted(self) -> set[int]:
        return {i for message in self.received if isinstance(message, Abort) for i in array("Q", message.request_ids)}

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        wait_until(condition, timeout_s)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        context = make_context()
        channel = ServerChannel(context, self.address)
        readiness = Readiness([channel.pollable])
        self._bound.set()
        try:
            while not self._is_closing:
                readiness.wait(TURN_S)
                if self.is_silent:
                    time.sleep(TURN_S)
                    continue
                while (received := channel.receive()) is not None:
                    client, message = received
                    assert not isinstance(message, Exception), message
                    self.received.append(message)
                    self._send(channel, client, list(self._handle(client, message)))
                answers = [] if self.is_paused else self._step()
                while self._extra:
                    answers.append(self._extra.pop(0))
                for _ in range(100 if self.flood is not None else 0):
                    answers.append(replace(self.flood, sequence=self._sequence))
                    self._sequence += 1
                self._send(channel, self._client, answers)
        finally:
            channel.close()
            context.destroy(0)

    def _send(self, channel: ServerChannel, client: bytes, answers: list[Message]) -> None:
        try:
            for answer in answers:
                channel.send(client, answer)
        except PeerGone:
            self.running.clear()

    def _handle(self, client: bytes, message: Message) -> Iterator[Message]:
        if isinstance(message, Hello):
            self._client, self._sequence, self.running = client, 0, {}
            if self.refuse is not None:
                yield self.refuse
                return
            yield Welcome(self.epoch, self.model, VOCAB, self.context_limit_tokens, 16, 64, self.window, base_seed=1)
        elif isinstance(message, AddRequests):
            for request in message.requests:
                rejection = self.reject(request)
                if rejection is not None:
                    yield rejection
                    continue
                last = array("i", request.prompt_ids)[-1]
                for i in range(len(request.seeds) // 8):
                    self.running[request.request_id + i] = Running(request, i, last + 10 * i)
            self.max_outstanding = max(self.max_outstanding, len(self.running))
        elif isinstance(message, Abort):
            ended = [i for i in array("Q", message.request_ids) if i in self.running]
            if ended:
                yield self._make_outputs([(self.running.pop(i), [], FinishReason.ABORT) for i in ended])
        elif isinstance(message, Control) and message.action == ControlAction.PING:
            yield Pong(self.epoch, 0)
        elif isinstance(message, Control) and message.action == ControlAction.STATS:
            yield Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.5)

    def _step(self) -> list[Message]:
        entries: list[tuple[Running, list[int], int]] = []
        for run in list(self.running.values()):
            tokens: list[int] = []
            finish = 0
            stop_ids = set(array("i", run.request.sampling.stop_ids))
            while not finish:
                run.num_generated += 1
                run.last = (run.last + 1) % VOCAB
                tokens.append(run.last)
                if run.last in stop_ids:
                    finish = FinishReason.STOP
                elif run.num_generated == run.request.max_tokens:
                    finish = FinishReason.LENGTH
                if run.request.stream:
                    break
            entries.append((run, tokens, finish))
            if finish:
                del self.running[run.request_id]
        return [self._make_outputs(entries)] if entries else []

    def _make_outputs(self, entries: list[tuple[Running, list[int], int]]) -> Outputs:
        tokens = [token for _, own, _ in entries for token in own]
        logprobs = [
            (token + k, -0.5 * k)
            for run, own, _ in entries
            for token in own
            for k in range((run.request.sampling.num_logprobs or 0) + 1)
            if run.request.sampling.num_logprobs is not None
        ]
        outputs = Outputs(
            sequence=self._sequence,
            request_ids=array("Q", [run.request_id for run, _, _ in entries]).tobytes(),
            num_tokens=array("i", [len(own) for _, own, _ in entries]).tobytes(),
            finish_reasons=bytes(finish for _, _, finish in entries),
            cached_tokens=array("i", [self.num_cached_tokens if finish else 0 for _, _, finish in entries]).tobytes(),
            tokens=array("i", tokens).tobytes(),
            errors=(),
            logprob_ids=array("i", [token for token, _ in logprobs]).tobytes(),
            logprob_values=array("f", [value for _, value in logprobs]).tobytes(),
        )
        self._sequence += self.sequence_step
        return outputs


@contextmanager
def running_engine(address: str, **options: object) -> Iterator[FakeEngine]:
    engine = FakeEngine(address, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def text_params(**changes: Any) -> SamplingParams:
    """Three tokens, whatever they are."""
    return SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **changes})
