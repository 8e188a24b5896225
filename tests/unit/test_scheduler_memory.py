"""When pages run short: preemption, overtaking, and the books."""

from random import Random

import numpy as np
import pytest
from scheduler_scenario import Scenario, admitted, continue_prompt, get_decode_slots, get_grants, make_prompt

from minisgl.core import FinishReason
from minisgl.scheduler.page_pool import IntegrityError
from minisgl.scheduler.request import Request

STOP = 7


def run_long(num_requests: int, max_tokens: int, **changes: object) -> Scenario:
    """Requests that together outgrow the pool."""
    s = Scenario(**changes)
    for i in range(num_requests):
        s.submit(make_prompt(5, 50 * i), max_tokens=max_tokens, stream=i % 2 == 0)
    s.run()
    return s


# ---------------------------------------------------------------------------------------------------- shortage


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("num_pages", [7, 10, 15])
def test_schedule_too_small_pool_changes_no_token(num_pages, cache_type, depth):
    s = run_long(6, 20, num_pages=num_pages, cache_type=cache_type, max_steps_in_flight=depth)
    assert s.scheduler.stats().num_preemptions > 0
    assert list(s.tokens.values()) == [continue_prompt(make_prompt(5, 50 * i), 20) for i in range(6)]
    assert set(s.ends.values()) == {FinishReason.LENGTH}


def test_schedule_oldest_request_is_never_preempted_and_others_at_most_once_for_each_older_one():
    s = Scenario(num_pages=9)
    requests = [s.submit(make_prompt(5, 50 * i), max_tokens=25) for i in range(5)]
    s.run()
    assert requests[0].num_preemptions == 0 < s.scheduler.stats().num_preemptions
    assert all(request.num_preemptions <= i for i, request in enumerate(requests))


def test_schedule_newest_request_makes_room_and_waits_for_an_older_one_to_end():
    s = Scenario(num_pages=5, max_steps_in_flight=1)
    first = s.submit(make_prompt(5, 0), max_tokens=12)
    second = s.submit(make_prompt(5, 50), max_tokens=8)
    s.advance(4)
    assert (first.state, second.state) == ("running", "running")
    s.advance()  # both are at a page's end, and one page is left
    assert (first.state, second.state, second.slot) == ("running", "waiting", None)
    assert (second.num_accepted_tokens, second.num_written_tokens) == (9, 0)
    while not s.ends:
        assert second.state == "waiting"
        s.advance()
    assert s.ends == {0: FinishReason.LENGTH}
    s.run()
    assert s.tokens == {i: continue_prompt(make_prompt(5, 50 * i), n) for i, n in enumerate((12, 8))}


def test_schedule_admit_after_preemption_tells_prompt_from_output():
    s = Scenario(num_pages=5, max_steps_in_flight=1)
    s.submit(make_prompt(5), max_tokens=12)
    second = s.submit(make_prompt(5, 50), max_tokens=8, stop_ids=(STOP,), min_tokens=6, script={4: STOP, 6: STOP})
    admits = []
    while s.scheduler.has_work:
        admits += [] if (step := s.issue()) is None else step.admits
        s.answer()
    first_time, again = [admit for admit in admits if admit.seed == 1]
    assert second.num_preemptions == 1
    known = [*make_prompt(5, 50), *continue_prompt(make_prompt(5, 50), 4)]
    assert (first_time.num_prompt_tokens, again.num_prompt_tokens) == (5, 5)
    assert np.frombuffer(again.token_ids, np.int32).tolist() == known
    assert again.num_cached_tokens == 4, "of 8 tokens written before, those that the first request left room for"
    assert s.cached_tokens[1] == 0, "but it is no prefix hit of the prompt"
    # min_tokens counts the output before the preemption, and no more than that.
    assert s.ends[1] is FinishReason.STOP and len(s.tokens[1]) == 7


def test_schedule_row_without_page_sits_out_until_one_comes_back():
    s = Scenario(num_pages=6, max_steps_in_flight=2)
    s.submit(make_prompt(3), max_tokens=4)
    s.submit(make_prompt(8, 50), max_tokens=16)
    s.submit(make_prompt(6, 100), max_tokens=4)
    decode_sets = []
    while s.scheduler.has_work:
        step = s.issue()
        if step is not None and step.decode_slots is not None:
            decode_sets.append(get_decode_slots(step))
        if step is None or len(s.unanswered) == 2:
            s.answer()
    assert any(1 not in slots for slots in decode_sets[1:-1]), "row 1 had to wait"
    assert s.tokens[1] == continue_prompt(make_prompt(8, 50), 16)


def test_schedule_no_more_are_preempted_than_the_missing_pages_need():
    s = Scenario(num_pages=12, max_steps_in_flight=2, max_running_req=4)
    requests = [s.submit(make_prompt(6, 50 * i), max_tokens=20) for i in range(4)]
    while not s.scheduler.stats().num_preemptions:
        s.advance()
    assert [request.num_preemptions for request in requests] == [0, 0, 0, 1]
    s.run()


def test_complete_preempted_request_that_ends_while_draining_is_not_computed_again():
    s = Scenario(num_pages=5, max_steps_in_flight=2)
    s.submit(make_prompt(5), max_tokens=12)
    second = s.submit(make_prompt(5, 50), max_tokens=8, stop_ids=(STOP,), script={3: STOP})
    while not second.is_preempted:
        if s.issue() is None:
            s.answer()
    assert second.state == "draining" and 1 not in s.ends
    s.run()
    assert s.ends[1] is FinishReason.STOP and len(s.tokens[1]) == 4


@pytest.mark.parametrize("is_draining", [True, False])
def test_abort_request_after_its_preemption_gives_its_tokens_and_pages_back(is_draining):
    s = Scenario(num_pages=5, max_steps_in_flight=2)
    s.submit(make_prompt(5), max_tokens=12)
    second = s.submit(make_prompt(5, 50), max_tokens=8)
    while second.state != ("draining" if is_draining else "waiting") or not second.num_preemptions:
        if s.issue() is None:
            s.answer()
    outputs = s.abort(second)
    assert outputs.tokens.tolist() == continue_prompt(make_prompt(5, 50), len(outputs.tokens)) != []
    s.run()
    assert s.ends == {0: FinishReason.LENGTH, 1: FinishReason.ABORT}


def test_schedule_while_a_preempted_request_waits_nobody_else_is_admitted():
    s = Scenario(num_pages=6, max_running_req=3)
    requests = [s.submit(make_prompt(5, 50 * i), max_tokens=14) for i in range(2)]
    while not requests[1].num_preemptions:
        s.advance()
    s.submit(make_prompt(2, 500), max_tokens=1)
    while requests[1].state != "running":
        assert 2 not in s.ends and s.scheduler.stats().num_waiting > 0
        s.advance()
    s.run()
    assert set(s.ends) == {0, 1, 2}


def test_schedule_request_preempted_once_waits_though_its_pages_are_shared_by_then():
    """Its own pages were duplicates: given up for shared ones, it would fit at once, and be in the way again."""
    s = Scenario(num_pages=9, page_size=1, max_steps_in_flight=1, max_extend_tokens=3)
    s.submit([5] * 4, max_tokens=9, script=dict.fromkeys(range(9), 5))
    second = s.submit([5] * 2, max_tokens=4, script=dict.fromkeys(range(9), 5))
    s.run()
    assert second.num_preemptions == 1


@pytest.mark.parametrize("seed", range(60))
def test_schedule_under_random_pressure_keeps_to_age_and_order(seed):
    random = Random(seed)
    page_size = random.choice([1, 2, 4])
    s = Scenario(
        num_pages=random.randint(44 // page_size, 60 // page_size), page_size=page_size,
        max_steps_in_flight=random.randint(1, 8), max_running_req=5,
    )  # fmt: skip
    requests, slots = [], []
    for i in range(10):
        prompt, script = make_prompt(random.randint(1, 9), 50 * i), {random.randint(0, 30): STOP}
        requests.append(s.submit(prompt, random.randint(1, 30), script=script, stop_ids=(STOP,)))
    while s.scheduler.has_work:
        is_returning = any(request.is_preempted for request in requests)
        preempted = {r.request_id for r in requests if r.state == "waiting" and r.num_preemptions}
        decoding = [r for r in requests if r.state == "running" and r.num_issued_tokens >= len(r.token_ids)]
        step = s.issue()
        if step is not None:
            seeds = [admit.seed for admit in step.admits]
            assert not (is_returning and seeds), "nobody takes the pages that a preempted request gives up"
            assert not (preempted and seeds) or seeds[0] in preempted, "nobody goes before a preempted request"
            slots = slots if step.decode_slots is None else get_decode_slots(step)
            granted = [s.scheduler._table.requests[slot].admission_order for slot, _, _ in get_grants(step)]
            held = [r.admission_order for r in decoding if r.state == "running" and r.slot not in slots]
            assert not granted or not held or max(granted) < min(held), "older requests get pages first"
        if step is None or random.random() < 0.3:
            s.answer()
    assert all(request.num_preemptions <= request.admission_order for request in requests)
    for request, tokens in zip(requests, s.tokens.values(), strict=True):
        assert tokens[:-1] == continue_prompt(request.prompt_ids.tolist(), len(tokens) - 1)


# ---------------------------------------------------------------------------------------------------- overtaking


def test_schedule_later_prompt_overtakes_one_that_does_not_fit():
    s = Scenario(num_pages=10)
    s.submit(make_prompt(20), max_tokens=12)
    s.advance()
    big = s.submit(make_prompt(30, 100), max_tokens=2)
    s.submit(make_prompt(3, 200), max_tokens=2)
    s.advance(2)
    assert (big.state, big.num_overtaken) == ("waiting", 1)
    s.run()
    assert next(iter(s.ends)) == 2
    assert s.tokens[1] == continue_prompt(make_prompt(30, 100), 2)


def test_schedule_request_overtaken_often_enough_bars_the_way():
    s = Scenario(num_pages=20, max_running_req=3, context_limit_tokens=80)
    s.submit(make_prompt(20), max_tokens=50)
    s.advance()
    big = s.submit(make_prompt(70, 100), max_tokens=2)
    for i in range(8):
        s.submit(make_prompt(3, 200 + 10 * i), max_tokens=2)
    s.run()
    assert big.num_overtaken == 3 and big.admission_order == 1 + 3


def test_schedule_prompt_that_fits_only_without_margin_waits():
    s = Scenario(num_pages=5, max_running_req=2)
    first = s.submit(make_prompt(9), max_tokens=8)
    second = s.submit(make_prompt(5, 50), max_tokens=3)
    assert admitted(s) == [0], "2 pages are left, but the running request is about to need one"
    s.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_schedule_prompt_that_lacks_only_the_margin_is_not_overtaken():
    s = Scenario(num_pages=8)
    s.submit(make_prompt(9), max_tokens=20)
    s.advance()
    second = s.submit(make_prompt(17, 50), max_tokens=3)
    s.submit(make_prompt(3, 200), max_tokens=3)
    assert admitted(s) == [], "5 pages are free and wanted, and nobody may take one of them meanwhile"
    assert second.num_overtaken == 0
    s.run()


def test_schedule_prompt_that_did_not_fit_does_once_others_share_its_beginning():
    s = Scenario(num_pages=12, max_running_req=4)
    s.submit(make_prompt(13, 500), max_tokens=2)
    s.advance()
    big = s.submit(make_prompt(34), max_tokens=3)
    assert admitted(s) == [] and big.num_pages_short == 9
    s.submit(make_prompt(21), max_tokens=8)
    while big.state == "waiting":
        s.advance()
    assert 2 not in s.ends, "it need not wait until the request with which it shares 5 pages is over"
    s.run()
    assert s.cached_tokens == {0: 0, 1: 20, 2: 0}


def test_schedule_lof_admits_the_longest_output_first():
    s = Scenario(schedule_policy="lof", max_running_req=2)
    for i, max_tokens in enumerate([5, 20, 9, 30]):
        s.submit(make_prompt(5, 50 * i), max_tokens=max_tokens)
    assert admitted(s) == [3, 1]
    s.run()
    assert list(s.ends) == [1, 3, 2, 0]


# ---------------------------------------------------------------------------------------------------- books


def make_running() -> tuple[Scenario, Request, Request]:
    s = Scenario()
    requests = [s.submit(make_prompt(6, 50 * i), max_tokens=9) for i in range(2)]
    s.advance(2)
    return s, requests[0], requests[1]


def test_check_integrity_page_in_two_page_tables_is_an_error():
    s, first, second = make_running()
    table = s.scheduler._table.page_table
    table[first.slot, 1] = table[second.slot, 1]
    with pytest.raises(IntegrityError, match="two page tables"):
        s.scheduler.check_integrity()


def test_check_integrity_page_free_and_used_is_an_error():
    s, first, _ = make_running()
    s.scheduler._memory.pool.release(first.page_ids[1:2])
    with pytest.raises(IntegrityError, match="free and in a page table"):
        s.scheduler.check_integrity()


def test_check_integrity_lost_page_is_a_leak():
    s, _, _ = make_running()
    s.scheduler._memory.pool.allocate(3)
    assert s.scheduler.check_integrity() == 3


def test_check_integrity_slot_given_back_twice_is_an_error():
    s, _, _ = make_running()
    s.scheduler._table.free_slots.append(0)
    with pytest.raises(IntegrityError, match="slots"):
        s.scheduler.check_integrity()
