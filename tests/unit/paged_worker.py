"""The simulator's worker, whose tokens depend on the pages that it reads, and the reference, which knows no pages."""

import numpy as np

from minisgl.core import FinishReason
from minisgl.protocol import FAILED_ROW_BIT, Result, Step
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import SchedulerConfig

POISON = -1  # no hash is negative


class Wrong(Exception):
    """An answer, a page or a counter is not what it must be."""


def extend_history(value: int, token: int) -> int:
    """What a KV slot holds: a hash of the slot before it and the token."""
    return hash((value, token)) & 0x7FFFFFFFFFFFFFFF


def choose_token(values: list[int], vocab_size: int, fail_one_in: int) -> tuple[int, bool]:
    """(next token, row failed?) after a history, a function of every KV value in it."""
    mixed = hash(tuple(values)) & 0x7FFFFFFFFFFFFFFF
    return mixed // 7 % vocab_size, bool(fail_one_in) and mixed // 1001 % fail_one_in == 0


def reference_answer(
    prompt: list[int], room: int, stop_ids: tuple[int, ...], vocab_size: int, fail_one_in: int
) -> tuple[list[int], FinishReason]:
    """The tokens of a request, from its token list alone, and why it ends."""
    values: list[int] = []
    for token in prompt:
        values.append(extend_history(values[-1] if values else 0, token))
    tokens: list[int] = []
    while True:
        token, has_failed = choose_token(values, vocab_size, fail_one_in)
        if has_failed:
            return tokens, FinishReason.ERROR
        tokens.append(token)
        if token in stop_ids:
            return tokens, FinishReason.STOP
        if len(tokens) >= room:
            return tokens, FinishReason.LENGTH
        values.append(extend_history(values[-1], token))


class _Slot:
    """What the wire has told about a slot."""

    def __init__(self, token_ids: list[int], page_ids: list[int], length: int, num_logprobs: int | None):
        self.token_ids, self.page_ids, self.length, self.num_logprobs = token_ids, page_ids, length, num_logprobs


class PagedWorker:
    """Executes Steps; all that it knows of requests comes from the wire."""

    def __init__(self, config: SchedulerConfig, fail_one_in: int):
        self._config, self._fail_one_in = config, fail_one_in
        self._kv = [[POISON] * config.page_size for _ in range(config.num_pages)]
        self._poisoned: set[int] = set(range(config.num_pages))
        self._slots: dict[int, _Slot] = {}
        self._decode: list[int] = []

    def poison(self, free_pages: set[int]) -> None:
        """Overwrite pages that have become free."""
        for page in free_pages - self._poisoned:
            self._kv[page] = [POISON] * self._config.page_size
        self._poisoned = free_pages

    def check_pages(self, page_ids: list[int], token_ids: list[int], history: int) -> int:
        """Whether whole pages hold these tokens after this history. Returns the history at their end."""
        values = [value for page in page_ids for value in self._kv[page]]
        for token, value in zip(token_ids, values, strict=True):
            history = extend_history(history, token)
            if value != history:
                raise Wrong(f"cached pages {page_ids} do not hold the tokens under which they are found")
        return history

    def execute(self, step: Step, owners: dict[int, Request], holders: list[Request]) -> Result:
        """Run a step.

        Args:
            owners: the request of each slot when the step was issued.
            holders: all requests that hold pages now.
        """
        self._apply(step)
        self._holder_of: dict[int, list[Request]] = {}
        for request in holders:
            for page in request.page_ids.tolist():
                self._holder_of.setdefault(page, []).append(request)
        rows = list(self._decode) if step.run_decode else []
        if len(set(rows)) != len(rows):
            raise Wrong(f"step {step.step_id} lists a slot twice: {rows}")
        for slot in rows:
            state = self._slots[slot]
            self._write(state, owners[slot], state.token_ids[state.length])
        for slot, start, count, is_last in np.frombuffer(step.prefills, "<i4").reshape(-1, 4).tolist():
            state = self._slots[slot]
            if (
                slot in rows
                or start != state.length
                or count < 1
                or bool(is_last) != (start + count == len(state.token_ids))
            ):
                raise Wrong(
                    f"step {step.step_id}: prefill row {(slot, start, count, is_last)} at length {state.length}"
                )
            for token in state.token_ids[start : start + count]:
                self._write(state, owners[slot], token)
            if is_last:
                rows.append(slot)
        return self._sample(step, rows)

    def _apply(self, step: Step) -> None:
        for admit in step.admits:
            tokens = np.frombuffer(admit.token_ids, "<i4").tolist()
            pages = np.frombuffer(admit.page_ids, "<i4").tolist()
            if not 0 <= admit.num_cached_tokens < len(tokens) or len(pages) * self._config.page_size < len(tokens):
                raise Wrong(f"admit of {len(tokens)} tokens, {admit.num_cached_tokens} cached, {len(pages)} pages")
            self._slots[admit.slot] = _Slot(tokens, pages, admit.num_cached_tokens, admit.sampling.num_logprobs)
        for slot, index, page in np.frombuffer(step.page_grants, "<i4").reshape(-1, 3).tolist():
            if index != len(self._slots[slot].page_ids):
                raise Wrong(f"page {index} granted to slot {slot}, which has {len(self._slots[slot].page_ids)}")
            self._slots[slot].page_ids.append(page)
        if step.decode_slots is not None:
            self._decode = np.frombuffer(step.decode_slots, "<i4").tolist()

    def _write(self, state: _Slot, owner: Request, token: int) -> None:
        position, size = state.length, self._config.page_size
        page = state.page_ids[position // size]
        if self._holder_of.get(page) != [owner]:
            raise Wrong(f"{owner} writes page {page}, which {self._holder_of.get(page)} hold")
        before = self._read(state, position - 1) if position else 0
        self._kv[page][position % size] = extend_history(before, token)
        state.length += 1

    def _read(self, state: _Slot, position: int) -> int:
        value = self._kv[state.page_ids[position // self._config.page_size]][position % self._config.page_size]
        if value == POISON:
            raise Wrong(f"position {position} is read, which nobody wrote since its page was free")
        return value

    def _sample(self, step: Step, rows: list[int]) -> Result:
        tokens, ids, logprobs = [], [], []
        size = self._config.page_size
        for slot in rows:
            state = self._slots[slot]
            values = [v for page in state.page_ids[: -(-state.length // size)] for v in self._kv[page]][: state.length]
            if POISON in values:
                raise Wrong(f"slot {slot} reads position {values.index(POISON)}, which nobody wrote")
            token, has_failed = choose_token(values, self._config.vocab_size, self._fail_one_in)
            state.token_ids.append(token)
            tokens.append(token | FAILED_ROW_BIT if has_failed else token)
            if state.num_logprobs is not None:
                ids += [token, *range(state.num_logprobs)]
                logprobs += [0.0] * (state.num_logprobs + 1)
        packed = np.array(tokens, "<u4").tobytes(), np.array(ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes()
        return Result(step.step_id, *packed)
