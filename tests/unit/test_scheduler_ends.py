"""How requests end, when they give back what they hold, and what is put out."""

import numpy as np
import pytest
from scheduler_scenario import VOCAB_SIZE, Scenario, continue_prompt, make_prompt

from minisgl.core import FinishReason
from minisgl.protocol import Result

STOP = 7


# ---------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("index", [0, 1, 4])
def test_complete_stop_id_ends_the_request_and_drops_surplus_tokens(depth, index):
    s = Scenario(max_steps_in_flight=depth)
    s.submit(make_prompt(5), max_tokens=20, stop_ids=(STOP, 9), script={index: STOP})
    s.submit(make_prompt(6, 50), max_tokens=20)
    s.run()
    assert s.tokens[0] == [*continue_prompt(make_prompt(5), index), STOP] and s.ends[0] is FinishReason.STOP
    assert s.tokens[1] == continue_prompt(make_prompt(6, 50), 20) and s.ends[1] is FinishReason.LENGTH
    assert s.scheduler.stats().output_tokens == index + 1 + 20


def test_complete_stop_id_as_last_allowed_token_is_a_stop():
    s = Scenario()
    s.submit(make_prompt(5), max_tokens=3, stop_ids=(STOP,), script={2: STOP})
    s.run()
    assert s.ends[0] is FinishReason.STOP and len(s.tokens[0]) == 3


def test_complete_stop_id_of_another_request_does_not_end_this_one():
    s = Scenario()
    s.submit(make_prompt(5), max_tokens=6, stop_ids=(8,), script={1: STOP})
    s.submit(make_prompt(5, 50), max_tokens=6, stop_ids=(STOP,), script={3: STOP})
    s.submit(make_prompt(5, 90), max_tokens=6, stop_ids=(STOP, 8), script={0: 8})
    s.run()
    assert list(s.ends.values()) == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [len(tokens) for tokens in s.tokens.values()] == [6, 4, 1]


def test_stop_ids_are_looked_for_only_while_their_requests_live():
    s = Scenario()
    first = s.submit(make_prompt(5), stop_ids=(7, 8))
    s.submit(make_prompt(5, 50), stop_ids=(8, 9, VOCAB_SIZE))
    is_stop = s.scheduler._results.stops.is_stop
    assert is_stop.nonzero()[0].tolist() == [7, 8, 9]
    s.abort(first)
    assert is_stop.nonzero()[0].tolist() == [8, 9]
    s.run()
    assert not is_stop.any()


@pytest.mark.parametrize("min_tokens, num_tokens", [(0, 1), (1, 2), (3, 4)])
def test_complete_stop_ids_before_min_tokens_do_not_end_the_request(min_tokens, num_tokens):
    s = Scenario()
    script = dict.fromkeys(range(20), STOP)
    s.submit(make_prompt(5), max_tokens=10, stop_ids=(STOP,), min_tokens=min_tokens, script=script)
    s.run()
    assert s.tokens[0] == [STOP] * num_tokens and s.ends[0] is FinishReason.STOP


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("index", [0, 2])
def test_complete_failed_row_ends_that_request_with_the_step(stream, index):
    s = Scenario(max_steps_in_flight=3)
    s.submit(make_prompt(5), max_tokens=9, stream=stream, script={index: None})
    s.submit(make_prompt(5, 50), max_tokens=9)
    s.run()
    assert s.ends == {0: FinishReason.ERROR, 1: FinishReason.LENGTH}
    assert s.tokens[0] == continue_prompt(make_prompt(5), index)
    assert s.tokens[1] == continue_prompt(make_prompt(5, 50), 9)
    assert s.errors == [f"step {index}: the model returned a logit that is not finite"]
    assert (s.scheduler.stats().num_failed, s.scheduler.stats().output_tokens) == (1, index + 9)


def test_complete_failed_row_whose_id_is_a_stop_id_is_an_error():
    s = Scenario()
    s.submit(make_prompt(5), stop_ids=(0,), script={0: None})
    s.run()
    assert s.ends == {0: FinishReason.ERROR} and s.tokens[0] == []


def test_complete_wrong_step_or_number_of_tokens_is_refused():
    s = Scenario(max_steps_in_flight=3)
    s.submit(make_prompt(5))
    s.issue()
    with pytest.raises(AssertionError, match="result of step 1, expected 0"):
        s.scheduler.complete(Result(1, np.zeros(1, np.uint32).tobytes(), b"", b""))
    s = Scenario()
    s.submit(make_prompt(5))
    s.issue()
    with pytest.raises(AssertionError, match="1 sampling rows, its result 2 tokens"):
        s.scheduler.complete(Result(0, np.zeros(2, np.uint32).tobytes(), b"", b""))


def test_complete_token_outside_of_the_vocabulary_is_refused():
    s = Scenario()
    s.submit(make_prompt(5))
    s.issue()
    with pytest.raises(AssertionError, match="step 0 returned the token id 1000"):
        s.scheduler.complete(Result(0, np.array([VOCAB_SIZE], np.uint32).tobytes(), b"", b""))


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("max_extend_tokens", [3, 16, 64])
def test_complete_tokens_do_not_depend_on_depth_or_chunks(depth, max_extend_tokens):
    s = Scenario(max_steps_in_flight=depth, max_extend_tokens=max_extend_tokens, max_running_req=3)
    prompts = [make_prompt(n, 40 * n) for n in (1, 3, 4, 5, 8, 17)]
    for i, prompt in enumerate(prompts):
        s.submit(prompt, max_tokens=3 * i + 1, stream=i % 2 == 0)
    s.run()
    assert list(s.tokens.values()) == [continue_prompt(prompt, 3 * i + 1) for i, prompt in enumerate(prompts)]


# ---------------------------------------------------------------------------------------------------- release


def test_complete_pages_and_slot_are_held_until_the_last_step_completes():
    s = Scenario(max_steps_in_flight=3)
    request = s.submit(make_prompt(5), max_tokens=20, stop_ids=(STOP,), script={0: STOP})
    for _ in range(3):
        s.issue()
    s.answer()
    assert s.ends == {0: FinishReason.STOP}, "the terminal output does not wait for the surplus rows"
    for _ in range(2):
        assert (request.state, request.slot) == ("draining", 0)
        assert s.scheduler.stats().num_pages_used == 2 and s.scheduler.has_work
        assert s.issue() is None
        s.answer()
    assert (request.state, request.slot, len(request.page_ids)) == ("finished", None, 0)
    assert s.scheduler.stats().num_pages_used == 0 and not s.scheduler.has_work


def test_complete_counters_of_a_request_follow_its_steps():
    s = Scenario(max_extend_tokens=4)
    request = s.submit(make_prompt(6), max_tokens=5)

    def counts() -> tuple[int, int, int]:
        return request.num_issued_tokens, request.num_written_tokens, request.num_accepted_tokens

    assert (request.state, counts()) == ("waiting", (0, 0, 6))
    s.issue()
    assert (request.state, counts()) == ("running", (4, 0, 6))
    s.issue()
    assert counts() == (6, 0, 6)
    s.answer()
    s.issue()
    assert counts() == (7, 4, 6)
    s.answer()
    assert counts() == (7, 6, 7)
    s.advance()
    assert counts() == (8, 7, 8)


# ---------------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_events", range(14))
def test_abort_request_at_any_point_ends_it_once(num_events, stream, depth):
    s = Scenario(max_extend_tokens=4, max_steps_in_flight=depth)
    prompt, other = make_prompt(10), make_prompt(6, 60)
    request = s.submit(prompt, max_tokens=4, stream=stream)
    s.submit(other, max_tokens=8)
    for event in range(num_events):
        if event % 2 == 0:
            s.issue()
        elif s.unanswered:
            s.answer()
    had_ended = 0 in s.ends
    outputs = s.abort(request)
    if not had_ended:
        assert s.ends[0] is FinishReason.ABORT and len(outputs) == 1
    assert not len(s.abort(request))
    assert s.tokens[0] == continue_prompt(prompt, len(s.tokens[0]))
    again = s.submit(prompt, max_tokens=4)
    s.run()
    assert s.tokens[1] == continue_prompt(other, 8)
    assert s.tokens[again.request_id] == continue_prompt(prompt, 4), "nothing half-written was left in the cache"


def test_abort_request_unknown_id_changes_nothing():
    s = Scenario()
    s.submit(make_prompt(5))
    before = s.scheduler.stats()
    assert not len(s.scheduler.abort_request(0, 99)) and not len(s.scheduler.abort_request(5, 0))
    assert s.scheduler.stats() == before


def test_abort_request_not_streaming_returns_its_tokens_so_far():
    s = Scenario()
    request = s.submit(make_prompt(5), max_tokens=20)
    s.advance(4)
    outputs = s.abort(request)
    assert outputs.tokens.tolist() == continue_prompt(make_prompt(5), 4)
    s.run()


def test_abort_client_ends_all_its_requests_without_outputs():
    s = Scenario(max_running_req=2)
    for i in range(6):
        s.submit(make_prompt(5, 50 * i), max_tokens=5, client_id=i % 2, stream=True)
    s.advance(2)
    s.scheduler.abort_client(1)
    s.run()
    assert set(s.ends) == {0, 2, 4} and s.scheduler.stats().num_aborted == 3


# ---------------------------------------------------------------------------------------------------- outputs


def test_complete_streaming_request_has_an_entry_for_each_token():
    s = Scenario()
    s.submit(make_prompt(5), max_tokens=3, stream=True)
    tokens = continue_prompt(make_prompt(5), 3)
    for i in range(3):
        outputs = s.advance()
        assert (outputs.request_ids.tolist(), outputs.tokens.tolist()) == ([0], [tokens[i]])
        assert outputs.finish_reasons.tolist() == [FinishReason.LENGTH if i == 2 else 0]


def test_complete_request_that_does_not_stream_has_one_entry_at_its_end():
    s = Scenario()
    s.submit(make_prompt(5), max_tokens=3)
    assert [len(s.advance()) for _ in range(2)] == [0, 0]
    outputs = s.advance()
    assert (outputs.num_tokens.tolist(), outputs.tokens.tolist()) == ([3], continue_prompt(make_prompt(5), 3))


def test_complete_streamed_entries_come_grouped_by_client():
    s = Scenario()
    for i in range(6):
        s.submit(make_prompt(5, 50 * i), max_tokens=9, client_id=i % 2, stream=i != 3)
    outputs = s.advance(3)
    assert list(zip(outputs.client_ids.tolist(), outputs.request_ids.tolist(), strict=True)) == [
        (0, 0), (0, 2), (0, 4), (1, 1), (1, 5),
    ]  # fmt: skip
    assert outputs.tokens.tolist() == [continue_prompt(make_prompt(5, 50 * i), 3)[2] for i in (0, 2, 4, 1, 5)]
    assert outputs.client_ids.dtype == np.int64 and outputs.request_ids.dtype == np.uint64
    assert outputs.num_tokens.dtype == outputs.tokens.dtype == outputs.cached_tokens.dtype == np.int32
    assert outputs.finish_reasons.dtype == np.uint8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [{}, {3: STOP}, {3: None}])
def test_complete_logprobs_go_with_their_tokens(stream, end):
    s = Scenario(max_steps_in_flight=3)
    s.submit(make_prompt(5, 50), max_tokens=9, stream=True)
    s.submit(make_prompt(5), max_tokens=5, num_logprobs=2, stream=stream, stop_ids=(STOP,), script=end)
    s.submit(make_prompt(5, 90), max_tokens=6, num_logprobs=0, stream=not stream)
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while s.scheduler.has_work:
        outputs = s.advance()
        start = 0
        for request_id, num_items in zip(outputs.request_ids.tolist(), outputs.num_logprobs.tolist(), strict=True):
            got[request_id] += outputs.logprob_ids[start : start + num_items].tolist()
            start += num_items
        assert start == len(outputs.logprob_ids)
        assert np.allclose(outputs.logprob_values, outputs.logprob_ids / 10)
    assert got == {0: [], 1: [i for token in s.tokens[1] for i in (token, 0, 1)], 2: s.tokens[2]}
    assert len(s.tokens[1]) == (5 if not end else 4 if end[3] else 3)


def test_complete_logprobs_of_an_aborted_request_are_those_of_its_tokens():
    s = Scenario()
    request = s.submit(make_prompt(5), max_tokens=9, num_logprobs=1)
    s.advance(3)
    outputs = s.abort(request)
    assert outputs.num_logprobs.tolist() == [6]
    assert outputs.logprob_ids[::2].tolist() == outputs.tokens.tolist() == continue_prompt(make_prompt(5), 3)
    s.run()
