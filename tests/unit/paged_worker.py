"""The simulator's worker, whose tokens depend on the pages that it reads, and the reference, which knows no pages."""

from dataclasses import dataclass, field

import numpy as np

from minisgl.core import FinishReason
from minisgl.protocol import FAILED_ROW_BIT, Result, Step

MASK = 0x7FFFFFFFFFFFFFFF
BITS_OF_VALUE = 0xFFFF


class Wrong(Exception):
    """An answer, a page, a message or a counter is not what it must be."""


def extend_history(value: int, token: int) -> int:
    """What a KV slot holds: a hash of the slot before it and the token. Never negative."""
    return hash((value, token)) & MASK


@dataclass(frozen=True, slots=True)
class Model:
    """What stands for a language model: a function of every KV value in a history."""

    vocab_size: int
    fail_one_in: int  # rows whose logits are not finite; 0 = none

    def sample(self, values: list[int]) -> int:
        """A draw after a history, from which all that a row returns follows."""
        return hash(tuple(values)) & MASK

    def get_token(self, draw: int) -> int:
        return draw // 7 % self.vocab_size

    def has_failed(self, draw: int) -> bool:
        return bool(self.fail_one_in) and draw // 1001 % self.fail_one_in == 0

    def get_logprobs(self, draw: int, num_items: int) -> tuple[list[int], list[float]]:
        """`num_items` ids and values, the first of them of the chosen token; NaN where the row has failed."""
        ids = [self.get_token(draw), *((draw >> i) % self.vocab_size for i in range(1, num_items))][:num_items]
        values = [(draw >> (2 * i)) & BITS_OF_VALUE for i in range(num_items)]  # whole numbers that a float32 holds
        return ids, [float("nan")] * num_items if self.has_failed(draw) else [-float(value) for value in values]


@dataclass(slots=True)
class Answer:
    """What a request must be answered when nobody aborts it."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    logprob_ids: list[int] = field(default_factory=list)  # num_items for each token
    logprob_values: list[float] = field(default_factory=list)


def make_reference(
    model: Model, prompt: list[int], room: int, stop_ids: tuple[int, ...], min_tokens: int, num_items: int
) -> Answer:
    """The answer, computed from the token list alone."""
    answer = Answer()
    values: list[int] = []
    for token in prompt:
        values.append(extend_history(values[-1] if values else 0, token))
    while True:
        draw = model.sample(values)
        if model.has_failed(draw):
            answer.reason = FinishReason.ERROR
            return answer
        token = model.get_token(draw)
        answer.tokens.append(token)
        ids, logprobs = model.get_logprobs(draw, num_items)
        answer.logprob_ids += ids
        answer.logprob_values += logprobs
        if token in stop_ids and len(answer.tokens) > min_tokens:
            answer.reason = FinishReason.STOP
            return answer
        if len(answer.tokens) >= room:
            return answer
        values.append(extend_history(values[-1], token))


@dataclass(slots=True)
class SlotState:
    """What the wire has told about a slot, and the tokens sampled in it."""

    token_ids: list[int]
    page_ids: list[int]
    length: int  # KV positions there
    num_items: int


class PagedWorker:
    """Executes Steps when they complete. All that it knows of requests comes from the wire."""

    def __init__(self, model: Model, num_pages: int, page_size: int):
        self.slots: dict[int, SlotState] = {}
        self._model, self._page_size = model, page_size
        self._kv = [0] * (num_pages * page_size)
        self._decode: list[int] = []
        self._num_poisoned = 0
        self.poison(range(num_pages))

    def poison(self, page_ids: "range | list[int] | set[int]") -> None:
        """Overwrite pages that are free, or were when they were given out: each with a negative value of its own."""
        size = self._page_size
        for page in page_ids:
            self._num_poisoned += 1
            self._kv[page * size : (page + 1) * size] = [-self._num_poisoned] * size

    def check_pages(self, page_ids: list[int], token_ids: list[int], history: int) -> int:
        """Whether whole pages hold these tokens after this history. Returns the history at their end."""
        values = self._read_pages(page_ids)
        for token, value in zip(token_ids, values, strict=True):
            history = hash((history, token)) & MASK
            if value != history:
                raise Wrong(f"cached pages {page_ids} do not hold the tokens under which they are found")
        return history

    def execute(self, step: Step, writable: dict[int, int]) -> "tuple[Result, list[int], list[int]]":
        """Run a step.

        Args:
            writable: the pages that may be written at this moment, each with its slot.

        Returns:
            The result, and the slot and the draw of each sampling row.
        """
        self._apply(step)
        rows = list(self._decode) if step.run_decode else []
        for slot in rows:
            state = self.slots[slot]
            self._write(slot, state, state.token_ids[state.length : state.length + 1], writable)
        for slot, start, count, is_last in np.frombuffer(step.prefills, "<i4").reshape(-1, 4).tolist():
            state = self.slots[slot]
            if start != state.length:
                raise Wrong(f"step {step.step_id}: chunk of slot {slot} at {start}, its KV ends at {state.length}")
            self._write(slot, state, state.token_ids[start : start + count], writable)
            if is_last:
                rows.append(slot)
        return self._sample(step, rows)

    def _apply(self, step: Step) -> None:
        for admit in step.admits:
            tokens = np.frombuffer(admit.token_ids, "<i4").tolist()
            pages = np.frombuffer(admit.page_ids, "<i4").tolist()
            num_items = 0 if admit.sampling.num_logprobs is None else admit.sampling.num_logprobs + 1
            self.slots[admit.slot] = SlotState(tokens, pages, admit.num_cached_tokens, num_items)
        for slot, index, page in np.frombuffer(step.page_grants, "<i4").reshape(-1, 3).tolist():
            if index != len(self.slots[slot].page_ids):
                raise Wrong(f"page {index} granted to slot {slot}, which has {len(self.slots[slot].page_ids)}")
            self.slots[slot].page_ids.append(page)
        if step.decode_slots is not None:
            self._decode = np.frombuffer(step.decode_slots, "<i4").tolist()

    def _write(self, slot: int, state: SlotState, tokens: list[int], writable: dict[int, int]) -> None:
        """Write the KV of the next tokens of a slot, each from the one before it, read through the page table."""
        size, kv, pages = self._page_size, self._kv, state.page_ids
        if not tokens:
            raise Wrong(f"slot {slot} has a row but no token to compute at {state.length}")
        for position, token in enumerate(tokens, state.length):
            page = pages[position // size]
            if writable.get(page) != slot:
                raise Wrong(f"slot {slot} writes page {page}, which is shared or not its own ({writable.get(page)})")
            before = kv[pages[(position - 1) // size] * size + (position - 1) % size] if position else 0
            if before < 0:
                raise Wrong(f"slot {slot} reads position {position - 1}, which is poison {-before}")
            kv[page * size + position % size] = hash((before, token)) & MASK
        state.length += len(tokens)

    def _sample(self, step: Step, rows: list[int]) -> "tuple[Result, list[int], list[int]]":
        draws: list[int] = []
        tokens: list[int] = []
        ids: list[int] = []
        logprobs: list[float] = []
        model = self._model
        for slot in rows:
            state = self.slots[slot]
            values = self._read_pages(state.page_ids[: -(-state.length // self._page_size)])[: state.length]
            if min(values) < 0:
                raise Wrong(f"slot {slot} reads a position which is poison {-min(values)}")
            draw = model.sample(values)
            token = model.get_token(draw)
            state.token_ids.append(token)
            draws.append(draw)
            tokens.append(token | FAILED_ROW_BIT if model.has_failed(draw) else token)
            if state.num_items:
                more_ids, more_logprobs = model.get_logprobs(draw, state.num_items)
                ids += more_ids
                logprobs += more_logprobs
        packed = np.array(tokens, "<u4").tobytes(), np.array(ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes()
        return Result(step.step_id, *packed), rows, draws

    def _read_pages(self, page_ids: list[int]) -> list[int]:
        size, kv = self._page_size, self._kv
        return [value for page in page_ids for value in kv[page * size : (page + 1) * size]]
