"""Which waiting requests may start: in the order of the queue, as far as pages last, with bounded overtaking."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import InvalidRequest
from minisgl.scheduler.kv_memory import KVMemory
from minisgl.scheduler.policy import WaitingQueue
from minisgl.scheduler.radix_cache import PrefixMatch
from minisgl.scheduler.request import Request
from minisgl.scheduler.slot_table import SlotTable

# Waiting requests that one call looks past: bounds its time when many wait and few can start.
MAX_SKIPPED_REQUESTS = 32


class Admission:
    """Goes through the queue and says who may be admitted now.

    A request is passed over while it does not fit into the available pages, or while the next page of its prompt is
    being computed for another request (it waits to share it). Others may then overtake it, at most `max_overtakes` of
    them; after that it bars the way. A preempted request bars the way at once, from the moment when it starts to drain,
    unless it ends.
    It may come back after an older one has ended, and so is preempted at most once for each older one.
    """

    def __init__(self, memory: KVMemory, table: SlotTable, queue: WaitingQueue, max_overtakes: int) -> None:
        self._memory = memory
        self._table = table
        self._queue = queue
        self._max_overtakes = max_overtakes

    def iter_admissible(self) -> Iterator[tuple[Request, PrefixMatch]]:
        """Requests that may be admitted, with their prefix matches. Admit each one before asking for the next."""
        if self._queue.num_returning:
            return
        while (preempted := self._queue.first_preempted) is not None:
            match = self._find_match(preempted) if self._may_return(preempted) else None
            if match is None or not self._fits(preempted, match):
                return
            yield preempted, match
        yield from self._iter_new()

    def _iter_new(self) -> Iterator[tuple[Request, PrefixMatch]]:
        skipped: list[Request] = []
        for request in self._queue.iter_new(len(self._table.free_slots) + MAX_SKIPPED_REQUESTS):
            match = self._find_match(request)
            if match is not None and self._fits(request, match):
                for other in skipped:
                    other.num_overtaken += 1
                yield request, match
            elif match is not None and request.num_pages_short <= self._memory.pool.num_available:
                return  # it lacks the margin only, which nobody behind it may use up
            else:
                skipped.append(request)
            if len(skipped) == MAX_SKIPPED_REQUESTS or any(r.num_overtaken >= self._max_overtakes for r in skipped):
                return

    def _find_match(self, request: Request) -> PrefixMatch | None:
        """The cached prefix of a request; None if it cannot fit, or waits for a page that others compute."""
        is_need_known = request.num_changes_seen == self._memory.cache.num_changes
        if is_need_known and request.num_pages_short > self._memory.pool.num_available:
            return None  # since it was last looked at, its need can only have grown
        match = self._memory.match(request)
        return None if self._memory.is_next_page_in_progress(request, match) else match

    def _may_return(self, request: Request) -> bool:
        """Whether an older request has ended since this one was preempted.

        It seldom fits before, but it may, if it gave up pages of its own for shared ones: only to be in the way again.
        """
        assert request.admission_order is not None, f"{request} was never admitted"
        return self._table.count_older(request.admission_order) < request.num_older

    def _fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether its pages are available, and one more for each running request as a margin against preemption."""
        request.num_pages_short = self._memory.num_pages_needed(request, match)
        request.num_changes_seen = self._memory.cache.num_changes
        return request.num_pages_short + self._table.num_running <= self._memory.pool.num_available


def check_prompt(prompt_ids: NDArray[np.int32], vocab_size: int, context_limit_tokens: int) -> None:
    """Refuse a prompt that could never run.

    Raises:
        InvalidRequest: it is empty, leaves no room for an output token, or has an id outside of the vocabulary.
    """
    if not len(prompt_ids):
        raise InvalidRequest("prompt is empty, at least 1 token is needed")
    if len(prompt_ids) >= context_limit_tokens:
        raise InvalidRequest(
            f"prompt has {len(prompt_ids)} tokens, limit {context_limit_tokens - 1}: it must leave room for an output "
            f"token in a context of {context_limit_tokens}; shorten it, or raise max_seq_len or num_pages"
        )
    is_outside = (prompt_ids < 0) | (prompt_ids >= vocab_size)
    if is_outside.any():
        index = int(is_outside.argmax())
        raise InvalidRequest(f"prompt has the token id {prompt_ids[index]} at {index}, limit {vocab_size - 1}")
