"""A scheduler and a tiny worker that answers its steps, for tests that read as scenarios."""

from collections import deque
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from minisgl.core import FinishReason
from minisgl.protocol import FAILED_ROW_BIT, Admit, Result, Sampling, Step, decode, encode
from minisgl.scheduler.request import Request, StepOutputs
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig

VOCAB_SIZE = 1000
SAMPLING = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, b"", b"", b"", None)


def make_config(**changes: object) -> SchedulerConfig:
    """Room for everything: tests narrow what they are about."""
    values = dict(
        num_pages=64, page_size=4, max_running_req=8, max_extend_tokens=64, context_limit_tokens=200,
        vocab_size=VOCAB_SIZE, max_steps_in_flight=2,
    )  # fmt: skip
    return SchedulerConfig(**(values | changes))


def make_sampling(stop_ids: tuple[int, ...] = (), min_tokens: int = 0, num_logprobs: int | None = None) -> Sampling:
    packed = np.array(stop_ids, np.int32).tobytes()
    return replace(SAMPLING, stop_ids=packed, min_tokens=min_tokens, num_logprobs=num_logprobs)


def make_prompt(num_tokens: int, first: int = 10) -> list[int]:
    """Consecutive ids, so that prompts with other first ids share no prefix."""
    return [(first + i) % VOCAB_SIZE for i in range(num_tokens)]


def next_token(token_ids: list[int]) -> int:
    """The token that the worker's model finds most likely after these. Never below 100: tests script those."""
    digest = blake2b(np.array(token_ids, np.int32).tobytes(), digest_size=8).digest()
    return 100 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 100)


def continue_prompt(prompt: list[int], num_tokens: int) -> list[int]:
    """What the worker answers without scripts."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeWorker:
    """Keeps for each KV location the tokens up to its position, so that reading a wrong page fails at once.

    The token sampled for output position i of a request is `scripts[seed][i]` where there is one (None: the row fails),
    else `next_token`.
    """

    def __init__(self, page_size: int) -> None:
        self.scripts: dict[int, dict[int, int | None]] = {}
        self._page_size = page_size
        self._kv: dict[tuple[int, int], tuple[int, ...]] = {}  # by (page, offset)
        self._slots: dict[int, tuple[Admit, list[int], list[int]]] = {}  # admit, tokens, pages
        self._decode_slots: list[int] = []

    def run(self, step: Step) -> Result:
        for admit in step.admits:
            pages = np.frombuffer(admit.page_ids, np.int32).tolist()
            self._slots[admit.slot] = admit, np.frombuffer(admit.token_ids, np.int32).tolist(), pages
        for slot, index, page in np.frombuffer(step.page_grants, np.int32).reshape(-1, 3).tolist():
            assert len(self._slots[slot][2]) == index
            self._slots[slot][2].append(page)
        if step.decode_slots is not None:
            self._decode_slots = np.frombuffer(step.decode_slots, np.int32).tolist()
        sampled: list[int] = []
        logprobs: list[int] = []
        for slot in self._decode_slots if step.run_decode else []:
            self._write(slot, len(self._slots[slot][1]) - 1)
            self._sample(slot, sampled, logprobs)
        for slot, start, num_tokens, is_last in np.frombuffer(step.prefills, np.int32).reshape(-1, 4).tolist():
            for position in range(start, start + num_tokens):
                self._write(slot, position)
            assert bool(is_last) == (start + num_tokens == len(self._slots[slot][1]))
            if is_last:
                self._sample(slot, sampled, logprobs)
        values = np.array(logprobs, np.float32) / 10
        return Result(
            step.step_id,
            np.array(sampled, np.uint32).tobytes(),
            np.array(logprobs, np.int32).tobytes(),
            values.tobytes(),
        )

    def _write(self, slot: int, position: int) -> None:
        _, tokens, pages = self._slots[slot]
        before = self._kv[self._locate(pages, position - 1)] if position else ()
        self._kv[self._locate(pages, position)] = (*before, tokens[position])

    def _sample(self, slot: int, sampled: list[int], logprobs: list[int]) -> None:
        admit, tokens, pages = self._slots[slot]
        for position in range(len(tokens)):
            assert self._kv[self._locate(pages, position)] == tuple(tokens[: position + 1]), f"position {position}"
        script = self.scripts.get(admit.seed, {})
        token = script.get(len(tokens) - admit.num_prompt_tokens, next_token(tokens))
        tokens.append(0 if token is None else token)
        sampled.append(FAILED_ROW_BIT if token is None else token)
        if admit.sampling.num_logprobs is not None:
            logprobs += [tokens[-1], *range(admit.sampling.num_logprobs)]

    def _locate(self, pages: list[int], position: int) -> tuple[int, int]:
        return pages[position // self._page_size], position % self._page_size


class Scenario:
    """Drives a scheduler. After every event its books are checked, and what was put out is kept by request id."""

    def __init__(self, **changes: object) -> None:
        self.config = make_config(**changes)
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(self.config.page_size)
        self.unanswered: deque[Step] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.cached_tokens: dict[int, int] = {}
        self.errors: list[str] = []
        self._num_requests = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 3,
        *,
        stream: bool = False,
        client_id: int = 0,
        script: dict[int, int | None] | None = None,
        **sampling: object,
    ) -> Request:
        """Add a request. Its id is its number, from 0."""
        number = self._num_requests
        self._num_requests += 1
        prompt_ids = np.array(prompt, np.int32)
        request = Request(client_id, number, prompt_ids, max_tokens, make_sampling(**sampling), number, stream)
        self.scheduler.add_request(request)
        self.worker.scripts[number] = script or {}
        self.tokens[number] = []
        self._check()
        return request

    def issue(self) -> Step | None:
        """One call of schedule."""
        step = self.scheduler.schedule(0.0)
        if step is not None:
            sent = decode(encode(step))
            assert isinstance(sent, Step) and sent == step
            self.unanswered.append(step)
        self._check()
        return step

    def answer(self) -> StepOutputs:
        """The worker completes the oldest step."""
        outputs = self.scheduler.complete(self.worker.run(self.unanswered.popleft()))
        return self._keep(outputs)

    def abort(self, request: Request) -> StepOutputs:
        return self._keep(self.scheduler.abort_request(request.client_id, request.request_id))

    def advance(self, num_steps: int = 1) -> StepOutputs:
        """Issue as much as may be in flight and complete one step, so many times. Returns the last outputs."""
        assert num_steps > 0
        for _ in range(num_steps):
            while self.issue() is not None:
                pass
            outputs = self.answer()
        return outputs

    def run(self) -> None:
        """Until no work is left."""
        while self.scheduler.has_work:
            self.advance()
        stats = self.scheduler.stats()
        assert stats.num_pages_used == stats.num_waiting == stats.num_running == stats.num_draining == 0
        assert stats.num_accepted == stats.num_finished + stats.num_aborted + stats.num_failed

    def _keep(self, outputs: StepOutputs) -> StepOutputs:
        start = 0
        for i, request_id in enumerate(outputs.request_ids.tolist()):
            end = start + int(outputs.num_tokens[i])
            assert request_id not in self.ends, f"request {request_id} has an output after its end"
            self.tokens[request_id] += outputs.tokens[start:end].tolist()
            if outputs.finish_reasons[i]:
                self.ends[request_id] = FinishReason(int(outputs.finish_reasons[i]))
                self.cached_tokens[request_id] = int(outputs.cached_tokens[i])
            start = end
        assert start == len(outputs.tokens)
        self.errors += outputs.errors
        self._check()
        return outputs

    def _check(self) -> None:
        assert self.scheduler.check_integrity() == 0
        stats = self.scheduler.stats()
        assert stats.num_pages_free + stats.num_pages_cached + stats.num_pages_used == self.config.num_pages


def admitted(scenario: Scenario) -> list[int]:
    """Ids of the requests that the next step admits."""
    step = scenario.issue()
    return [] if step is None else [admit.seed for admit in step.admits]  # a scenario's seeds are its ids


def get_prefills(step: Step) -> list[list[int]]:
    """[slot, first position, number of tokens, last chunk?] of each chunk."""
    return np.frombuffer(step.prefills, np.int32).reshape(-1, 4).tolist()


def get_decode_slots(step: Step) -> list[int] | None:
    return None if step.decode_slots is None else np.frombuffer(step.decode_slots, np.int32).tolist()


def get_grants(step: Step) -> list[list[int]]:
    """[slot, index, page] of each grant."""
    return np.frombuffer(step.page_grants, np.int32).reshape(-1, 3).tolist()
