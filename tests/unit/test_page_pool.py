"""Pages are free, cached or referenced, never two of these, and never lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.scheduler.page_pool import IntegrityError, PagePool


def ids(*page_ids: int) -> np.ndarray:
    return np.array(page_ids, np.int32)


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_allocate_hands_out_each_page_once():
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first.tolist() == [0, 1] and sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert counts(pool) == (0, 0, 5)


def test_allocate_more_than_free_is_refused_and_changes_nothing():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 1)


def test_allocate_none_gives_none():
    assert PagePool(3).allocate(0).tolist() == []


def test_allocate_result_is_a_copy():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    page_ids[:] = 3
    assert pool.allocate(2).tolist() == [2, 3]


def test_release_frees_a_page_with_its_last_reference():
    pool = PagePool(4)
    page_ids = pool.allocate(3)
    pool.mark_cached(page_ids[:2])
    pool.acquire(page_ids[:2])
    assert counts(pool) == (1, 0, 3)
    pool.release(page_ids)
    assert counts(pool) == (2, 0, 2), "the page that is not cached is free, the shared ones are not"
    pool.release(page_ids[:2])
    assert counts(pool) == (2, 2, 0)
    pool.drop_cached(page_ids[:2])
    assert counts(pool) == (4, 0, 0)


def test_release_of_a_free_page_is_an_error():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    pool.release(page_ids)
    with pytest.raises(IntegrityError, match="in no page table"):
        pool.release(page_ids[:1])


def test_acquire_of_a_page_that_is_not_cached_is_an_error():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    with pytest.raises(IntegrityError, match="not in the prefix cache"):
        pool.acquire(page_ids)


def test_acquire_of_a_cached_page_makes_it_used():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    pool.mark_cached(page_ids)
    pool.release(page_ids)
    assert pool.num_available == 4
    pool.acquire(page_ids[:1])
    assert (counts(pool), pool.num_available) == ((2, 1, 1), 3)


def test_mark_cached_of_a_free_or_cached_page_is_an_error():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    pool.mark_cached(page_ids[:1])
    for wrong in (page_ids[:1], ids(3)):
        with pytest.raises(IntegrityError, match="enter the prefix cache"):
            pool.mark_cached(wrong)


def test_drop_cached_of_a_used_or_unknown_page_is_an_error():
    pool = PagePool(4)
    page_ids = pool.allocate(2)
    pool.mark_cached(page_ids[:1])
    for wrong in (page_ids[:1], page_ids[1:]):
        with pytest.raises(IntegrityError, match="leave the prefix cache"):
            pool.drop_cached(wrong)


def test_count_leaked_with_balanced_books_is_zero():
    pool = PagePool(6)
    page_ids = pool.allocate(4)
    pool.mark_cached(page_ids[:2])
    pool.acquire(page_ids[:1])
    held = np.concatenate((page_ids, page_ids[:1]))
    assert pool.count_leaked(held, page_ids[:2]) == 0


@pytest.mark.parametrize(
    "held, cached, text",
    [
        ([0, 1, 1], [], "two page tables"),
        ([0, 1, 2], [], "free and in a page table"),
        ([0, 1], [2], "free and cached"),
        ([0, 1], [0, 0], "cached twice"),
        ([0, 0, 1], [0], "more page tables than counted"),
        ([0, 1], [1], "not marked"),
        ([0, 1, 9], [], "outside of 0..3"),
    ],
)
def test_count_leaked_with_two_owners_is_an_error(held, cached, text):
    pool = PagePool(4)
    pool.mark_cached(pool.allocate(2)[:1])
    with pytest.raises(IntegrityError, match=text):
        pool.count_leaked(ids(*held), ids(*cached))


def test_count_leaked_after_a_page_was_freed_twice_is_an_error():
    pool = PagePool(4)
    pool.allocate(2)
    pool._free_ids[2] = pool._free_ids[1]
    pool.num_free += 1
    with pytest.raises(IntegrityError, match="free twice"):
        pool.count_leaked(ids(0, 1), ids())


def test_count_leaked_counts_pages_that_nobody_owns():
    pool = PagePool(6)
    pool.mark_cached(pool.allocate(4)[:2])
    assert pool.count_leaked(ids(0, 1, 2, 3), ids(0, 1)) == 0
    assert pool.count_leaked(ids(0, 1, 2), ids(0, 1)) == 1
    assert pool.count_leaked(ids(1, 2, 3), ids(0)) == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "cache", "release", "evict"]), st.integers(0, 7))))
def test_any_sequence_of_calls_keeps_every_page_in_one_place(calls):
    pool = PagePool(8)
    tables: list[np.ndarray] = []
    cached: set[int] = set()
    for call, number in calls:
        if call == "allocate" and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif call == "share" and cached:
            tables.append(ids(*sorted(cached)[: number + 1]))
            pool.acquire(tables[-1])
        elif call == "cache" and tables:
            new = [page for page in tables[number % len(tables)].tolist() if page not in cached]
            pool.mark_cached(ids(*new))
            cached.update(new)
        elif call == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif call == "evict":
            unused = [page for page in cached if all(page not in table for table in tables)][:number]
            pool.drop_cached(ids(*unused))
            cached.difference_update(unused)
        held = np.concatenate([ids(), *tables])
        assert pool.count_leaked(held, ids(*cached)) == 0
        used = set(held.tolist())
        assert counts(pool) == (8 - len(used | cached), len(cached - used), len(used))
