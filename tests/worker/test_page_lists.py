"""The lists that planners on the host get, against plain Python."""

import random

import numpy as np
import pytest
import torch

from minisgl_worker.attention.base import AttentionSetup, HostRows, PrefillRow
from minisgl_worker.attention.page_lists import (
    PageLists,
    join,
    list_decode_pages,
    list_prefill_pages,
    pack_lists,
    query_indptr,
    split_workspace_bytes,
)


def make_rows(lengths: list[int], page_size: int, rng: random.Random) -> HostRows:
    """Rows in shuffled slots of a table that is wider and longer than they need."""
    num_slots, width = len(lengths) + 3, -(-max(lengths) // page_size) + 2
    table = np.array([[rng.randrange(10_000) for _ in range(width)] for _ in range(num_slots)], np.int32)
    slots = np.array(rng.sample(range(num_slots), len(lengths)), np.int64)
    return HostRows(np.array(lengths, np.int64), table, slots)


def read_lists(lists: PageLists) -> list[tuple[list[int], int]]:
    """(pages, tokens in the last page) of each row."""
    ends = zip(lists.indptr, lists.indptr[1:], strict=False)
    pages = [lists.indices[begin:end].tolist() for begin, end in ends]
    return list(zip(pages, lists.last_page_len.tolist(), strict=True))


def expect_row(length: int, pages: list[int], page_size: int) -> tuple[list[int], int]:
    used = 0
    while used * page_size < length:
        used += 1
    return pages[:used], length - (used - 1) * page_size


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_list_decode_pages_of_any_lengths_equals_a_loop_over_rows(page_size: int) -> None:
    rng = random.Random(page_size)
    for lengths in ([1], [page_size], [page_size + 1], [4000, 1, 16, 17, 64, 65, 333], [1] * 20 + [2000] + [3] * 20):
        rows = make_rows(lengths, page_size, rng)
        lists = list_decode_pages(rows, page_size)
        expected = [
            expect_row(length, rows.page_table[slot].tolist(), page_size)
            for length, slot in zip(lengths, rows.slots, strict=True)
        ]
        assert read_lists(lists) == expected
        assert {lists.indptr.dtype, lists.indices.dtype, lists.last_page_len.dtype} == {np.dtype(np.int32)}


def test_join_of_decode_and_prefill_rows_lists_both_in_order() -> None:
    rows = make_rows([5, 32, 33], 16, random.Random(0))
    prefills = (PrefillRow(3, 20, 0, torch.tensor([7, 8])), PrefillRow(23, 1, 47, torch.tensor([9, 1, 4])))
    decode, prompts = list_decode_pages(rows, 16), list_prefill_pages(prefills, 16)
    assert read_lists(join(decode, prompts)) == [*read_lists(decode), ([7, 8], 4), ([9, 1, 4], 16)]
    assert query_indptr(3, prefills).tolist() == [0, 1, 2, 3, 23, 24]
    none = list_prefill_pages((), 16)
    assert read_lists(join(decode, none)) == read_lists(decode)
    assert none.indptr.tolist() == [0] and query_indptr(2, ()).tolist() == [0, 1, 2]


def test_prefill_row_whose_pages_do_not_fit_its_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="pages end elsewhere"):
        list_prefill_pages((PrefillRow(0, 17, 0, torch.tensor([7])),), 16)
    with pytest.raises(AssertionError, match="do not follow"):
        query_indptr(1, (PrefillRow(2, 5, 0, torch.tensor([7])),))


@pytest.mark.parametrize("max_rows", [3, 4, 7, 256])
def test_pack_lists_puts_each_list_at_its_fixed_place(max_rows: int) -> None:
    lists = list_decode_pages(make_rows([5, 32, 33], 16, random.Random(1)), 16)
    packed = pack_lists(lists, max_rows)
    middle, header = PageLists.last_page_len_at(max_rows), PageLists.header_size(max_rows)
    assert max_rows + 1 <= middle and middle % 4 == 0 and header % 4 == 0
    assert packed[:4].tolist() == lists.indptr.tolist()
    assert packed[middle : middle + 3].tolist() == lists.last_page_len.tolist()
    assert packed[header:].tolist() == lists.indices.tolist()


def test_pack_lists_of_too_many_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="room for 2 rows, batch has 3"):
        pack_lists(list_decode_pages(make_rows([1, 1, 1], 16, random.Random(1)), 16), 2)


def test_split_workspace_has_room_for_the_tiles_of_the_largest_graph() -> None:
    """335 tiles of 16 rows: 256 rows of 5 query heads each, where every row may end inside a tile."""
    setup = AttentionSetup(
        40, 8, 128, (None,), torch.bfloat16, 16, max_rows=256, max_seq_len=1024, device=torch.device("cpu")
    )
    assert 0 <= split_workspace_bytes(setup, 132) - 335 * 16 * 40 * 129 * 4 <= 2**21
