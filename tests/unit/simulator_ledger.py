"""What the issued steps have told so far: who has which slot and which pages, and how far it is."""

from dataclasses import dataclass

import numpy as np

from minisgl.protocol import Admit, Step
from minisgl.scheduler.request import Request
from tests.unit.paged_worker import Wrong
from tests.unit.simulator_setup import Asked, Setup


def expect(condition: bool, *words: object) -> None:
    """Fail with these words unless the condition holds."""
    if not condition:
        raise Wrong(" ".join(map(str, words)))


@dataclass(slots=True, eq=False)
class Holding:
    """A request from its admission until its slot and pages are taken back."""

    asked: Asked
    slot: int
    pages: list[int]
    num_known: int  # tokens at admission; they are computed in chunks
    num_cached: int  # of them, found in the prefix cache
    num_issued: int  # KV positions that steps have promised
    first_step: int
    last_step: int  # the last one that lists it
    is_shared: bool = False  # the full pages of its prompt are written, and offered to others

    @property
    def is_decoding(self) -> bool:
        return self.num_issued >= self.num_known

    @property
    def is_running(self) -> bool:
        """Whether it is to have further rows."""
        asked = self.asked
        return asked.is_live and self.num_issued < asked.num_final and not asked.request.is_preempted


@dataclass(frozen=True, slots=True)
class Issued:
    """A step in flight."""

    step: Step
    sampling: list[Holding]  # one for each sampling row
    decoding: list[Holding]
    prefills: list[Holding]
    admitted: list[Holding]
    fresh_pages: list[int]  # given out with it
    num_prefill_tokens: int
    has_chunk: bool  # that is not the last of its prompt

    @property
    def listed(self) -> list[Holding]:
        return [*self.decoding, *self.prefills]

    def __str__(self) -> str:
        admits = {holding.slot: (holding.asked, holding.num_cached, holding.pages) for holding in self.admitted}
        grants = np.frombuffer(self.step.page_grants, "<i4").reshape(-1, 3).tolist()
        decode = {holding.slot: holding.asked for holding in self.decoding}
        chunks = np.frombuffer(self.step.prefills, "<i4").reshape(-1, 4).tolist()
        return f"issue {self.step.step_id} admits {admits} grants {grants} decode {decode} chunks {chunks}"


class Ledger:
    """Follows steps as they are issued, and refuses those that are not well-formed."""

    def __init__(self, setup: Setup):
        self.holdings: dict[int, Holding] = {}  # by slot
        self._setup = setup
        self._page_size = setup.config.page_size
        self._decode: list[int] = []

    def take_back(self, holders: dict[int, Request], oldest_in_flight: int) -> None:
        """Close what the scheduler has released: nothing that a step in flight lists."""
        for slot, holding in list(self.holdings.items()):
            if holders.get(slot) is not holding.asked.request:
                expect(
                    holding.last_step < oldest_in_flight,
                    holding.asked, "has lost slot", slot, "while step", holding.last_step, "lists it",
                )  # fmt: skip
                del self.holdings[slot]

    def apply(self, step: Step, asked_by_seed: dict[int, Asked], cached: dict[tuple[int, ...], int]) -> Issued:
        """Follow one more step, given the pages of the prefix cache by the tokens up to their end."""
        fresh: list[int] = []
        admitted = [self._admit(step.step_id, admit, asked_by_seed, cached, fresh) for admit in step.admits]
        for slot, index, page in np.frombuffer(step.page_grants, "<i4").reshape(-1, 3).tolist():
            holding = self.holdings[slot]
            expect(
                index == len(holding.pages) and index * self._page_size == holding.num_issued,
                "grant", (slot, index, page), "at position", holding.num_issued, "with pages", holding.pages,
            )  # fmt: skip
            holding.pages.append(page)
            fresh.append(page)
        held = [page for holding in self.holdings.values() for page in holding.pages]
        for page in fresh:
            expect(held.count(page) == 1 and page not in cached.values(), "page", page, "is given out while in use")
        decoding = self._run_decode(step)
        rows = np.frombuffer(step.prefills, "<i4").reshape(-1, 4).tolist()
        prefills = [self._run_chunk(step.step_id, *row) for row in rows]
        expect(bool(decoding or prefills), "step", step.step_id, "has no row")
        num_tokens, limit = sum(row[2] for row in rows), self._setup.config.max_extend_tokens
        has_chunk = not all(row[3] for row in rows)
        expect(num_tokens <= limit, num_tokens, "prompt tokens in a step, the budget is", limit)
        expect(num_tokens == limit or not has_chunk, "a prompt is cut at", num_tokens, "though the budget is", limit)
        expect({h.slot for h in admitted} <= {row[0] for row in rows}, "an admitted request has no row")
        last_chunks = [holding for holding, row in zip(prefills, rows, strict=True) if row[3]]
        return Issued(step, decoding + last_chunks, decoding, prefills, admitted, fresh, num_tokens, has_chunk)

    def _admit(self, step_id: int, admit: Admit, asked_by_seed: dict[int, Asked], cached: dict[tuple[int, ...], int],
               fresh: list[int]) -> Holding:  # fmt: skip
        asked, slot, size = asked_by_seed[admit.seed], admit.slot, self._page_size
        tokens = np.frombuffer(admit.token_ids, "<i4").tolist()
        pages = np.frombuffer(admit.page_ids, "<i4").tolist()
        expect(asked.is_live, asked, "is admitted after its end")
        expect(0 <= slot < self._setup.config.max_running_req and slot not in self.holdings, "slot", slot, "is taken")
        expect(admit.num_prompt_tokens == len(asked.prompt), asked, "has another prompt length")
        expect(admit.sampling == asked.request.sampling, asked, "has other sampling values")
        known = asked.prompt + asked.reference.tokens[: asked.num_sampled]
        expect(tokens == known, asked, "is admitted with", tokens, "and not with", known)
        expect(len(pages) == -(-len(tokens) // size), asked, "of", len(tokens), "tokens has pages", pages)
        expect(0 <= min(pages) <= max(pages) < self._setup.config.num_pages, asked, "has pages", pages)
        match = []
        for end in range(size, len(tokens), size):
            page = cached.get(tuple(tokens[:end]))
            if page is None:
                break
            match.append(page)
        num_cached = admit.num_cached_tokens
        expect(
            num_cached == len(match) * size and pages[: len(match)] == match,
            asked, "is admitted with", num_cached, "cached tokens in", pages, "and the cache has", match,
        )  # fmt: skip
        fresh += pages[len(match) :]
        holding = Holding(asked, slot, pages, len(tokens), num_cached, num_cached, step_id, step_id)
        self.holdings[slot] = holding
        return holding

    def _run_decode(self, step: Step) -> list[Holding]:
        if step.decode_slots is not None:
            self._decode = np.frombuffer(step.decode_slots, "<i4").tolist()
            expect(len(set(self._decode)) == len(self._decode), "a slot is twice in", self._decode)
        holdings = [self.holdings[slot] for slot in self._decode] if step.run_decode else []
        for holding in holdings:
            expect(holding.is_running and holding.is_decoding, holding.asked, "decodes though it must not")
            expect(len(holding.pages) * self._page_size > holding.num_issued, holding.asked, "decodes without a page")
            holding.num_issued += 1
            holding.last_step = step.step_id
        return holdings

    def _run_chunk(self, step_id: int, slot: int, start: int, count: int, is_last: int) -> Holding:
        holding = self.holdings[slot]
        end = start + count
        expect(holding.is_running, holding.asked, "has a chunk though it has ended")
        expect(
            start == holding.num_issued and count > 0 and end <= holding.num_known
            and is_last == (end == holding.num_known),
            "chunk", (slot, start, count, is_last), "at", holding.num_issued, "of", holding.num_known,
        )  # fmt: skip
        holding.num_issued = end
        holding.last_step = step_id
        return holding
