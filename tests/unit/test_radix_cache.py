"""The prefix cache by example: pages of two tokens, tokens written as words of letters."""

import numpy as np
import pytest

from minisgl.scheduler.page_pool import PagePool
from minisgl.scheduler.radix_cache import NaiveCache, PrefixMatch, RadixCache

PAGE_SIZE = 2


def tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


class Books:
    """A cache and its pool. A request is the array of pages that it holds."""

    def __init__(self, num_pages: int = 32) -> None:
        self.pool = PagePool(num_pages)
        self.cache = RadixCache(self.pool, PAGE_SIZE)

    def match(self, text: str, max_pages: int = 100) -> PrefixMatch:
        return self.cache.match_prefix(tokens(text), min(max_pages, len(text) // PAGE_SIZE))

    def start(self, text: str) -> np.ndarray:
        """A request takes what is cached, and new pages for the rest."""
        match = self.match(text)
        self.cache.acquire(match)
        num_new = -(-len(text) // PAGE_SIZE) - len(match.page_ids)
        return np.concatenate((match.page_ids, self.pool.allocate(num_new)))

    def end(self, text: str, pages: np.ndarray) -> None:
        self.cache.release(tokens(text), pages)

    def use(self, text: str) -> np.ndarray:
        """A request from start to end. Returns the pages that it held."""
        pages = self.start(text)
        self.end(text, pages)
        return pages

    def runs(self) -> list[str]:
        """The text of each node."""
        nodes = self.cache.iter_nodes()
        return sorted("".join(chr(i) for i in np.frombuffer(node.tokens, np.int32)) for node in nodes)


def matched(books: Books, text: str) -> int:
    return len(books.match(text).page_ids)


# ---------------------------------------------------------------------------------------------------- match and insert


@pytest.mark.parametrize(
    "text, num_pages",
    [("a", 0), ("ab", 1), ("abc", 1), ("abcd", 2), ("abcde", 2), ("abxd", 1), ("abcx", 1), ("axcd", 0)],
)
def test_match_prefix_finds_whole_pages_only(text, num_pages):
    books = Books()
    pages = books.use("abcd")
    match = books.match(text)
    assert match.page_ids.tolist() == pages[:num_pages].tolist()


def test_match_prefix_takes_no_more_than_allowed():
    books = Books()
    books.use("abcdef")
    assert [len(books.match("abcdef", limit).page_ids) for limit in (0, 1, 2, 3)] == [0, 1, 2, 3]


def test_match_prefix_changes_nothing():
    books = Books()
    books.use("abcdef")
    before = books.runs(), books.cache.num_changes, books.pool.num_cached
    books.match("abxx")
    assert (books.runs(), books.cache.num_changes, books.pool.num_cached) == before == (["abcdef"], before[1], 3)


def test_match_prefix_same_page_below_another_parent_is_no_match():
    books = Books()
    books.use("abcd")
    assert (matched(books, "cdcd"), matched(books, "xxcd"), matched(books, "abab")) == (0, 0, 1)


def test_release_text_shorter_than_a_page_caches_nothing():
    books = Books()
    books.use("a")
    books.use("")
    assert (books.runs(), books.pool.num_free) == ([], 32)


def test_release_caches_full_pages_and_frees_the_rest():
    books = Books()
    pages = books.start("abcde")
    books.end("abcde", pages)
    assert (books.pool.num_cached, books.pool.num_free) == (2, 30)
    assert books.match("abcd").page_ids.tolist() == pages[:2].tolist()


def test_release_of_less_than_was_computed_caches_only_that():
    books = Books()
    pages = books.start("abcdef")
    books.end("abc", pages)
    assert (books.runs(), books.pool.num_free) == (["ab"], 31)


def test_release_of_a_different_end_splits_the_run():
    books = Books()
    first, second = books.use("abcdef"), books.use("abxy")
    assert books.runs() == ["ab", "cdef", "xy"]
    assert books.match("abcdef").page_ids.tolist() == first.tolist()
    assert books.match("abxy").page_ids.tolist() == [first[0], second[1]]


def test_release_of_the_beginning_of_a_run_leaves_it_whole():
    books = Books()
    early = books.start("abcd")
    books.use("abcdef")
    books.end("abcd", early)
    assert books.runs() == ["abcdef"] and books.pool.num_free == 29


def test_release_of_a_page_that_is_cached_already_frees_the_duplicate():
    books = Books()
    first, second = books.start("abcd"), books.start("abcd")
    assert not set(first) & set(second)
    books.end("abcd", first)
    books.end("abcd", second)
    assert (books.pool.num_cached, books.pool.num_free) == (2, 30)
    assert books.match("abcd").page_ids.tolist() == first.tolist()


def test_release_hangs_new_pages_below_another_copy_of_the_old_ones():
    books = Books()
    first, second = books.start("abcd"), books.start("abcdef")
    books.end("abcd", first)
    books.end("abcdef", second)
    assert books.match("abcdef").page_ids.tolist() == [*first, second[2]]
    assert books.pool.num_free == 32 - 3


def test_insert_held_lets_others_share_pages_in_use():
    books = Books()
    pages = books.start("abcde")
    books.cache.insert_held(tokens("abcde"), pages)
    other = books.start("abcdxx")
    assert other[:2].tolist() == pages[:2].tolist()
    assert books.pool.reference_counts[pages].tolist() == [2, 2, 1]
    books.end("abcde", pages)
    assert (books.pool.num_used, books.pool.num_cached) == (3, 0)
    books.end("abcdxx", other)
    assert (books.pool.num_used, books.pool.num_cached) == (0, 3)


def test_insert_held_below_pages_of_another_request_is_left_for_the_release():
    books = Books()
    first, second = books.start("abcd"), books.start("abcdef")
    books.cache.insert_held(tokens("abcd"), first)
    books.cache.insert_held(tokens("abcdef"), second)
    assert books.match("abcdef").page_ids.tolist() == first.tolist()
    books.end("abcd", first)
    books.cache.evict(2)
    assert second.tolist() not in books.pool.free_ids.tolist() and books.pool.num_used == 3
    books.end("abcdef", second)
    assert books.match("abcdef").page_ids.tolist() == second.tolist()


def test_insert_held_twice_changes_nothing_more():
    books = Books()
    pages = books.start("abcd")
    for _ in range(2):
        books.cache.insert_held(tokens("abcd"), pages)
    assert books.runs() == ["abcd"] and books.pool.reference_counts[pages].tolist() == [1, 1]


def test_nodes_own_copies_of_their_pages():
    books = Books()
    pages = books.start("abcdef")
    kept = pages.copy()
    books.cache.insert_held(tokens("abcdef"), pages)
    pages[:] = 0
    match = books.match("abcdef")
    match.page_ids[:] = 0
    books.cache.acquire(books.match("ab"))
    for node in books.cache.iter_nodes():
        assert node.page_ids.base is None
    assert books.match("abcdef").page_ids.tolist() == kept.tolist()


# ---------------------------------------------------------------------------------------------------- acquire and split


def test_acquire_inside_a_run_splits_it_and_counts_only_the_matched_pages():
    books = Books()
    pages = books.use("abcdef")
    node = books.cache.acquire(books.match("abcdxx"))
    assert books.runs() == ["abcd", "ef"] and node.page_ids.tolist() == pages[:2].tolist()
    assert books.pool.reference_counts[pages].tolist() == [1, 1, 0]
    assert (books.pool.num_used, books.pool.num_cached) == (2, 1)


def test_acquire_of_nothing_returns_the_root():
    books = Books()
    node = books.cache.acquire(books.match("zz"))
    assert node is books.cache.acquire(books.match("yy")) and node.parent is None


def test_node_at_which_a_match_ends_stays_that_one_when_it_is_split():
    books = Books()
    books.use("abcdef")
    node = books.cache.acquire(books.match("abcdef"))
    books.cache.acquire(books.match("ab"))
    assert books.runs() == ["ab", "cdef"]
    assert books.match("abcdef").nodes[-1] is node


# ---------------------------------------------------------------------------------------------------- eviction


def test_evict_takes_the_least_recently_used_first():
    books = Books()
    for text in ("aabb", "ccdd", "eeff"):
        books.use(text)
    books.use("aabb")
    books.cache.evict(2)
    assert books.runs() == ["aabb", "eeff"]
    books.cache.evict(2)
    assert books.runs() == ["aabb"]


def test_evict_takes_a_run_from_its_end_and_no_more_than_asked():
    books = Books()
    pages = books.use("abcdefgh")
    books.cache.evict(1)
    assert books.runs() == ["abcdef"] and books.pool.num_free == 29
    books.cache.evict(2)
    assert books.match("abcdefgh").page_ids.tolist() == pages[:1].tolist()
    books.cache.evict(1)
    assert books.runs() == [] and books.pool.num_free == 32


def test_evict_takes_children_before_their_parent():
    books = Books()
    books.use("abcd")
    books.use("abxy")
    books.use("zz")
    books.cache.evict(2)
    assert books.runs() == ["ab", "zz"], "the parent is older than zz, but it was used again with its last child"
    books.cache.evict(1)
    assert books.runs() == ["zz"]


def test_evict_spares_the_parent_of_a_page_in_use():
    books = Books()
    first = books.start("abcd")
    books.cache.insert_held(tokens("abcd"), first)
    books.use("abxy")
    books.use("mm")
    books.cache.evict(2)
    assert books.runs() == ["ab", "cd"]
    assert books.pool.num_cached == 0 and books.pool.num_used == 2


def test_evict_part_of_a_split_run_keeps_the_age_of_its_use():
    books = Books()
    books.use("abcdef")
    books.use("xxyy")
    pages = books.start("abcdzz")  # splits abcdef; ef is not used again
    books.end("abcdzz", pages)
    books.cache.evict(1)
    assert books.runs() == ["abcd", "xxyy", "zz"]
    books.cache.evict(2)
    assert books.runs() == ["abcd", "zz"]


def test_evict_hot_prefix_outlives_the_ends_that_hang_below_it():
    books = Books()
    for end in ("11", "22", "33"):
        books.use("hothot" + end)
    books.use("cold")
    books.use("hothot44")
    books.cache.evict(5)
    assert books.runs() == ["44", "hothot"]


def test_evict_leaf_again_after_it_was_used_and_released():
    books = Books()
    books.use("abcd")
    pages = books.start("abcd")
    books.use("zz")
    books.cache.evict(1)
    assert books.runs() == ["abcd"], "in use: it leaves the order of eviction"
    books.end("abcd", pages)
    books.cache.evict(2)
    assert books.runs() == [] and books.pool.num_free == 32


def test_evict_more_than_is_unused_is_an_error():
    books = Books()
    books.use("abcd")
    books.start("ab")
    with pytest.raises(AssertionError, match="no unreferenced leaf"):
        books.cache.evict(2)


def test_clear_forgets_all_that_nobody_holds():
    books = Books()
    books.use("abcd")
    books.use("abxy")
    pages = books.start("abcd")
    books.cache.clear()
    assert matched(books, "abcd") == 2 and matched(books, "abxy") == 1
    books.end("abcd", pages)
    books.cache.clear()
    assert books.runs() == [] and books.pool.num_free == 32


def test_heap_does_not_grow_with_use():
    books = Books()
    for _ in range(50):
        books.use("abcd")
        books.use("abxy")
    assert len(books.cache._heap) <= 3


# ---------------------------------------------------------------------------------------------------- naive


def test_naive_cache_reuses_nothing_and_frees_at_once():
    pool = PagePool(8)
    cache = NaiveCache(pool, PAGE_SIZE)
    pages = pool.allocate(3)
    cache.insert_held(tokens("abcdef"), pages)
    cache.release(tokens("abcdef"), pages)
    assert len(cache.match_prefix(tokens("abcdef"), 3).page_ids) == 0
    assert (pool.num_free, pool.num_cached) == (8, 0)
    cache.clear()
    assert list(cache.iter_nodes()) == []
