"""RadixCache against a model that is a plain dictionary of token prefixes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.scheduler.page_pool import PagePool
from minisgl.scheduler.radix_cache import RadixCache

NUM_PAGES = 12
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Requests that take a prefix from the cache and new pages, share their prompt, and give all back."""

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.pool = PagePool(NUM_PAGES)
        self.cache = RadixCache(self.pool, page_size)
        self.model: dict[tuple[int, ...], int] = {}  # prefix of whole pages -> its last page
        self.held: list[tuple[list[int], np.ndarray]] = []  # (tokens, pages) of each request

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def expected_match(self, tokens: list[int], max_pages: int) -> list[int]:
        pages = []
        for prefix in self.prefixes(tokens)[:max_pages]:
            if prefix not in self.model:
                break
            pages.append(self.model[prefix])
        return pages

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        for max_pages in range(len(tokens) // self.page_size + 1):
            match = self.cache.match_prefix(np.array(tokens, np.int32), max_pages)
            assert match.page_ids.tolist() == self.expected_match(tokens, max_pages)

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        match = self.cache.match_prefix(np.array(tokens, np.int32), (len(tokens) - 1) // self.page_size)
        num_new = -(-len(tokens) // self.page_size) - len(match.page_ids)
        num_unheld = int((self.pool.reference_counts[match.page_ids] == 0).sum())
        if num_new > self.pool.num_available - num_unheld:
            return
        self.cache.acquire(match)
        if num_new > self.pool.num_free:
            self.cache.evict(num_new - self.pool.num_free)
            self.forget_evicted()
        self.held.append((tokens, np.concatenate((match.page_ids, self.pool.allocate(num_new)))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        tokens, pages = data.draw(st.sampled_from(self.held))
        self.cache.insert_held(np.array(tokens, np.int32), pages)
        for prefix, page in zip(self.prefixes(tokens), pages.tolist(), strict=False):
            if prefix not in self.model and not self.pool.is_cached[page]:
                break  # below a page of another request: rightly left out
            if self.model.setdefault(prefix, page) != page:
                break

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        tokens, pages = self.held.pop(index)
        self.cache.release(np.array(tokens, np.int32), pages)
        for prefix, page in zip(self.prefixes(tokens), pages.tolist(), strict=False):
            self.model.setdefault(prefix, page)

    @precondition(lambda self: self.pool.num_cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_cached))
        before = self.pool.num_free
        self.cache.evict(count)
        assert self.pool.num_free == before + count
        self.forget_evicted()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.pool.num_cached == 0
        self.forget_evicted()
        held = {page for _, pages in self.held for page in pages.tolist()}
        assert held.issuperset(self.model.values())

    def forget_evicted(self) -> None:
        self.model = {prefix: page for prefix, page in self.model.items() if self.pool.is_cached[page]}

    @invariant()
    def books_balance(self) -> None:
        held = np.concatenate([np.empty(0, np.int32), *(pages for _, pages in self.held)])
        cached = np.concatenate([np.empty(0, np.int32), *(node.page_ids for node in self.cache.iter_nodes())])
        assert self.pool.count_leaked(held, cached) == 0
        assert sorted(cached.tolist()) == sorted(self.model.values())

    @invariant()
    def a_prefix_is_there_with_all_that_come_before_it(self) -> None:
        for prefix in self.model:
            assert len(prefix) == self.page_size or prefix[: -self.page_size] in self.model


TestRadixCache = CacheMachine.TestCase
TestRadixCache.settings = settings(derandomize=True, max_examples=120, stateful_step_count=40, deadline=None)
