"""Prompts in progress, and the tokens kept by KV location."""

import numpy as np
import pytest
from scheduler_scenario import SAMPLING, make_prompt

from minisgl.scheduler.kv_memory import KVMemory
from minisgl.scheduler.request import Request
from minisgl.scheduler.slot_table import SlotTable


class Fixture:
    """Memory with pages of two tokens, and requests that are admitted by hand."""

    def __init__(self) -> None:
        self.memory = KVMemory(num_pages=32, page_size=2, cache_type="radix")
        self.table = SlotTable(num_slots=8, page_size=2, max_pages=32)

    def admit(self, prompt: list[int]) -> Request:
        request = make_request(prompt)
        match = self.memory.match(request)
        request.admission_order = 0
        self.table.take(request, 2 * len(match.page_ids), self.memory.take_prompt(request, match))
        return request

    def write(self, request: Request) -> None:
        self.table.num_issued[request.slot] = len(request.token_ids)

    def must_wait(self, prompt: list[int]) -> bool:
        request = make_request(prompt)
        return self.memory.is_next_page_in_progress(request, self.memory.match(request))


def make_request(prompt: list[int]) -> Request:
    return Request(0, 0, np.array(prompt, np.int32), 9, SAMPLING, 0, False)


@pytest.mark.parametrize(
    "prompt, must_wait",
    [
        ([1, 2, 3, 4, 5, 6, 7], True),
        ([1, 2, 9], True),
        ([1, 2], False),  # its only page is never matched
        ([1, 9, 3, 4, 5, 6, 7], False),
        ([3, 4, 5], False),
    ],
)
def test_is_next_page_in_progress_asks_for_the_first_page_that_is_missing(prompt, must_wait):
    f = Fixture()
    request = f.admit([1, 2, 3, 4, 5, 6, 7])
    assert f.must_wait(prompt) is must_wait
    f.write(request)
    f.memory.share_prompt(request)
    assert not f.must_wait(prompt)


def test_is_next_page_in_progress_looks_past_pages_that_came_from_elsewhere():
    f = Fixture()
    slow = f.admit([1, 2, 3, 4, 5, 6, 7, 8])
    other = f.admit([1, 2, 3, 4, 9])  # computes the same two pages, and is done first
    f.write(other)
    f.memory.release(other, other.token_ids)
    assert f.must_wait([1, 2, 3, 4, 5, 6, 0]), "page 5, 6 comes from the slow one"
    assert not f.must_wait([1, 2, 3, 4, 6, 6, 0]), "nobody computes page 6, 6"
    f.memory.release(slow, slow.token_ids[:0])
    assert not f.must_wait([1, 2, 3, 4, 5, 6, 0])


def test_is_next_page_in_progress_finds_a_prompt_whose_node_was_split():
    f = Fixture()
    first = f.admit([1, 2, 3, 4, 5])
    f.write(first)
    f.memory.share_prompt(first)
    f.admit([1, 2, 3, 4, 7, 8, 9])
    f.admit([1, 2, 6, 6, 6])
    assert f.must_wait([1, 2, 3, 4, 7, 8, 0])
    assert f.must_wait([1, 2, 6, 6, 0])
    assert not f.must_wait([1, 2, 7, 8, 0])


def test_release_of_an_unwritten_prompt_caches_nothing():
    f = Fixture()
    request = f.admit([1, 2, 3, 4, 5])
    f.memory.release(request, request.token_ids)
    assert (f.memory.pool.num_free, f.memory.pool.num_cached) == (32, 0)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_known_tokens_are_those_stored_where_the_rows_wrote(num_tokens):
    f = Fixture()
    prompt = make_prompt(num_tokens)
    request = f.admit(prompt)
    f.write(request)
    slots = np.array([request.slot])
    for output in range(5):
        position = num_tokens - 1 + output
        if output:
            if position % 2 == 0:
                f.table.page_table[request.slot, position // 2] = f.memory.allocate(1)[0]
            f.table.num_issued[request.slot] = position + 1
        location = f.table.get_locations(slots, np.array([position]))
        f.memory.store_tokens(location, np.array([800 + output], np.int32))
        outputs = list(range(800, 801 + output))
        assert f.memory.known_tokens(request).tolist() == prompt + outputs
        assert f.memory.output_tokens(request).tolist() == outputs


def test_count_owed_pages_leaves_out_those_that_others_hold():
    f = Fixture()
    first = f.admit([1, 2, 3, 4, 5])
    f.write(first)
    f.memory.share_prompt(first)
    second = f.admit([1, 2, 3, 4, 6])
    assert f.memory.count_owed_pages([]) == 0
    assert f.memory.count_owed_pages([second]) == 1
    assert f.memory.count_owed_pages([first, second]) == 4
