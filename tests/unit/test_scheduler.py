"""What the scheduler puts into steps, and whom it lets in."""

import numpy as np
import pytest
from scheduler_scenario import (
    VOCAB_SIZE,
    Scenario,
    continue_prompt,
    get_decode_slots,
    get_grants,
    get_prefills,
    make_prompt,
)

from minisgl.core import FinishReason
from minisgl.errors import InvalidRequest, Overloaded
from minisgl.scheduler.request import Request
from minisgl.scheduler.scheduler import LARGE_PREFILL_TOKENS

# ---------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
    "num_tokens, chunks",
    [
        (15, [[0, 0, 15, 1]]),
        (16, [[0, 0, 16, 1]]),
        (17, [[0, 0, 16, 0], [0, 16, 1, 1]]),
        (32, [[0, 0, 16, 0], [0, 16, 16, 1]]),
        (33, [[0, 0, 16, 0], [0, 16, 16, 0], [0, 32, 1, 1]]),
    ],
)
def test_schedule_prompt_around_the_budget_is_cut_into_chunks(num_tokens, chunks):
    s = Scenario(max_extend_tokens=16, max_steps_in_flight=8)
    s.submit(make_prompt(num_tokens), max_tokens=1)
    steps = [s.issue() for _ in chunks]
    assert [get_prefills(step) for step in steps] == [[chunk] for chunk in chunks]
    assert [len(step.admits) for step in steps] == [1] + [0] * (len(chunks) - 1)
    assert s.issue() is None
    s.run()
    assert s.tokens[0] == continue_prompt(make_prompt(num_tokens), 1)


def test_schedule_several_prompts_share_one_budget():
    s = Scenario(max_extend_tokens=16)
    for i in range(3):
        s.submit(make_prompt(7, 100 * i), max_tokens=1)
    assert get_prefills(s.issue()) == [[0, 0, 7, 1], [1, 0, 7, 1], [2, 0, 2, 0]]
    assert get_prefills(s.issue()) == [[2, 2, 5, 1]]


def test_schedule_admit_carries_the_whole_state_of_its_slot():
    s = Scenario()
    request = s.submit(make_prompt(9), stop_ids=(7,))
    (admit,) = s.issue().admits
    assert (admit.slot, admit.num_prompt_tokens, admit.num_cached_tokens, admit.seed) == (0, 9, 0, 0)
    assert np.frombuffer(admit.token_ids, np.int32).tolist() == make_prompt(9)
    assert np.frombuffer(admit.page_ids, np.int32).tolist() == request.page_ids.tolist() == [0, 1, 2]
    assert admit.sampling is request.sampling


def test_schedule_decode_rows_run_beside_every_chunk():
    s = Scenario(max_extend_tokens=4)
    s.submit(make_prompt(4), max_tokens=20)
    s.advance()
    s.submit(make_prompt(20, 500), max_tokens=2)
    steps = []
    while len(steps) < 5:
        if (step := s.issue()) is not None:
            steps.append(step)
        else:
            s.answer()
    assert all(step.run_decode for step in steps)
    assert [get_prefills(step) for step in steps[1:]] == [[[1, 4 * i, 4, i == 4]] for i in range(1, 5)]


def test_schedule_request_decodes_in_the_step_after_its_last_chunk():
    s = Scenario(max_steps_in_flight=8)
    s.submit(make_prompt(4), max_tokens=3)
    first, second, third = s.issue(), s.issue(), s.issue()
    assert (first.run_decode, get_decode_slots(first)) == (False, None)
    assert (second.run_decode, get_decode_slots(second)) == (True, [0])
    assert (third.run_decode, get_decode_slots(third)) == (True, None)
    assert s.issue() is None, "all three rows are issued before any token is known"


def test_schedule_row_at_a_page_end_is_granted_the_next_page():
    s = Scenario(max_steps_in_flight=8)
    request = s.submit(make_prompt(6), max_tokens=8)
    grants = [get_grants(s.issue()) for _ in range(8)]
    assert grants == [[], [], [], [[0, 2, 2]], [], [], [], [[0, 3, 3]]]
    assert request.page_ids.tolist() == [0, 1, 2, 3]


def test_schedule_steady_step_holds_no_more_than_flags():
    s = Scenario()
    s.submit(make_prompt(6), max_tokens=50)
    s.advance(3)
    step = s.issue()
    assert (step.admits, step.page_grants, step.decode_slots) == ((), b"", None)
    assert (step.run_decode, step.prefills) == (True, b"")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_schedule_runs_ahead_as_many_steps_as_allowed(depth):
    s = Scenario(max_steps_in_flight=depth)
    s.submit(make_prompt(4), max_tokens=50)
    assert [s.issue() is not None for _ in range(depth + 1)] == [True] * depth + [False]
    assert s.scheduler.num_in_flight == depth
    s.answer()
    assert s.issue() is not None and s.issue() is None


@pytest.mark.parametrize(
    "num_tokens, may_run_ahead", [(LARGE_PREFILL_TOKENS - 1, True), (LARGE_PREFILL_TOKENS, False), (600, False)]
)
def test_schedule_with_a_large_prefill_in_flight_waits_for_it(num_tokens, may_run_ahead):
    s = Scenario(max_extend_tokens=1000, context_limit_tokens=1000, num_pages=300)
    s.submit(make_prompt(5), max_tokens=50)
    s.advance(2)
    s.submit(make_prompt(num_tokens, 20), max_tokens=50)
    assert len(s.issue().admits) == 1
    s.answer()  # the decode step before it
    assert (s.issue() is not None) is may_run_ahead
    s.answer()
    s.advance()
    assert s.scheduler.num_in_flight == 1 and s.issue() is not None, "the step that follows runs ahead again"


def test_schedule_large_prefill_is_a_share_of_a_large_budget():
    s = Scenario(max_extend_tokens=4000, context_limit_tokens=4000, num_pages=1000)
    s.submit(make_prompt(999), max_tokens=50)
    s.issue()
    assert s.issue() is not None


def test_schedule_without_work_returns_none():
    s = Scenario()
    assert s.issue() is None and not s.scheduler.has_work


def test_schedule_ended_slots_are_taken_again_in_one_step():
    s = Scenario(max_running_req=2)
    for i in range(4):
        s.submit(make_prompt(5, 100 * i), max_tokens=2)
    s.advance(2)
    step = s.issue()
    assert {admit.slot for admit in step.admits} == {0, 1} and not step.run_decode
    assert get_decode_slots(step) == []
    s.run()
    assert [s.tokens[i] for i in range(4)] == [continue_prompt(make_prompt(5, 100 * i), 2) for i in range(4)]


def test_schedule_running_and_draining_requests_never_exceed_the_slots():
    s = Scenario(max_running_req=2, max_steps_in_flight=4)
    for i in range(3):
        s.submit(make_prompt(5, 100 * i), max_tokens=1)
    assert len(s.issue().admits) == 2
    assert s.scheduler.stats().num_draining == 2 and s.issue() is None
    s.answer()
    assert len(s.issue().admits) == 1


# ---------------------------------------------------------------------------------------------------- admission checks


@pytest.mark.parametrize("limits", [{"context_limit_tokens": 40}, {"context_limit_tokens": 200, "num_pages": 10}])
def test_add_request_prompt_without_room_for_a_token_is_refused_with_the_numbers(limits):
    s = Scenario(**limits)
    with pytest.raises(InvalidRequest, match=r"41 tokens, limit 39.* context of 40"):
        s.submit(make_prompt(41))
    with pytest.raises(InvalidRequest, match="40 tokens, limit 39"):
        s.submit(make_prompt(40))
    assert not s.scheduler.has_work
    request = s.submit(make_prompt(39), max_tokens=100)
    assert request.max_tokens == 1
    s.run()
    assert s.tokens[2] == continue_prompt(make_prompt(39), 1) and s.ends[2] is FinishReason.LENGTH


def test_add_request_max_tokens_past_the_context_is_cut():
    s = Scenario(context_limit_tokens=40)
    s.submit(make_prompt(30), max_tokens=1000)
    s.run()
    assert s.tokens[0] == continue_prompt(make_prompt(30), 10) and s.ends[0] is FinishReason.LENGTH


@pytest.mark.parametrize("prompt, text", [([], "empty"), ([1, VOCAB_SIZE], r"id 1000 at 1"), ([-1], r"id -1 at 0")])
def test_add_request_bad_prompt_is_refused(prompt, text):
    with pytest.raises(InvalidRequest, match=text):
        Scenario().submit(prompt)


def test_add_request_with_a_full_queue_is_overloaded_until_one_is_admitted():
    s = Scenario(max_queued_req=2)
    s.submit(make_prompt(5))
    s.submit(make_prompt(5, 100))
    with pytest.raises(Overloaded, match="2 requests are waiting, limit 2"):
        s.submit(make_prompt(5, 200))
    s.issue()
    s.submit(make_prompt(5, 300))
    s.run()
    assert set(s.ends) == {0, 1, 3}


def test_add_request_id_is_free_again_after_its_end():
    s = Scenario()
    request = s.submit(make_prompt(5))
    again = Request(0, 0, request.prompt_ids, 1, request.sampling, 0, False)
    with pytest.raises(AssertionError, match="live already"):
        s.scheduler.add_request(again)
    s.run()
    s.ends.clear()
    s.scheduler.add_request(again)
    s.run()
    assert s.ends == {0: FinishReason.LENGTH}


def test_add_request_same_id_of_two_clients_are_two_requests():
    s = Scenario()
    first = s.submit(make_prompt(5), client_id=1)
    s.scheduler.add_request(Request(2, 0, first.prompt_ids, 1, first.sampling, 0, False))
    s.scheduler.abort_client(1)
    s.run()
    assert s.ends == {0: FinishReason.LENGTH} and len(s.tokens[0]) == 1


# ---------------------------------------------------------------------------------------------------- looking in


def test_stats_count_what_happened():
    s = Scenario(max_running_req=2)
    for i in range(3):
        s.submit(make_prompt(5, 50 * i), max_tokens=4)
    s.advance()
    stats = s.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_draining, stats.num_accepted) == (2, 1, 0, 3)
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_steps) == (10, 2, 2)
    assert [request.request_id for request in s.scheduler.live_requests()] == [0, 1, 2]
    s.run()
    assert (s.scheduler.stats().prompt_tokens, s.scheduler.stats().output_tokens) == (15, 12)


def test_oldest_issued_at_is_that_of_the_oldest_step_in_flight():
    s = Scenario()
    assert s.scheduler.oldest_issued_at is None
    s.submit(make_prompt(5))
    s.unanswered += [s.scheduler.schedule(1.5), s.scheduler.schedule(2.5)]
    assert s.scheduler.oldest_issued_at == 1.5
    s.answer()
    assert s.scheduler.oldest_issued_at == 2.5
