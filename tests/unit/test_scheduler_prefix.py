"""The prefix cache at work in the scheduler."""

import pytest
from scheduler_scenario import Scenario, admitted, continue_prompt, make_prompt


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("num_tokens, num_cached", [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_schedule_same_prompt_again_is_served_from_the_cache(cache_type, num_tokens, num_cached):
    s = Scenario(cache_type=cache_type)
    for _ in range(2):
        s.submit(make_prompt(num_tokens), max_tokens=3)
        s.run()
    assert s.tokens[0] == s.tokens[1] == continue_prompt(make_prompt(num_tokens), 3)
    assert s.cached_tokens == {0: 0, 1: num_cached if cache_type == "radix" else 0}
    stats = s.scheduler.stats()
    assert (stats.prompt_tokens, stats.prefix_hit_tokens) == (2 * num_tokens, s.cached_tokens[1])


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8, 9])
def test_schedule_longer_prompt_uses_the_full_pages_of_a_shorter_one(num_tokens):
    s = Scenario()
    s.submit(make_prompt(num_tokens), max_tokens=1)
    s.run()
    longer = [*make_prompt(num_tokens), *make_prompt(6, 900)]
    s.submit(longer, max_tokens=4)
    s.run()
    assert s.tokens[1] == continue_prompt(longer, 4)
    assert s.cached_tokens[1] == num_tokens // 4 * 4


def test_schedule_conversation_uses_the_pages_of_the_answer_before():
    s = Scenario()
    s.submit(make_prompt(6), max_tokens=8)
    s.run()
    turn = [*make_prompt(6), *s.tokens[0], *make_prompt(3, 800)]
    s.submit(turn, max_tokens=4)
    s.run()
    # 14 tokens are known, but the newest one has no KV: 13 are written, 3 full pages.
    assert s.cached_tokens[1] == 12 and s.tokens[1] == continue_prompt(turn, 4)


def test_schedule_prompt_with_the_same_page_after_another_beginning_shares_nothing():
    s = Scenario()
    s.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    s.run()
    s.submit([9, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    s.run()
    assert s.cached_tokens == {0: 0, 1: 0} and s.tokens[1] == continue_prompt([9, 2, 3, 4, 5, 6, 7, 8, 9], 2)


@pytest.mark.parametrize("num_requests", [2, 5])
def test_schedule_equal_prompts_at_once_are_computed_once(num_requests):
    s = Scenario()
    for _ in range(num_requests):
        s.submit(make_prompt(10), max_tokens=4)
    assert admitted(s) == [0]
    assert admitted(s) == []
    s.answer()
    assert admitted(s) == list(range(1, num_requests))
    s.run()
    assert set(s.cached_tokens.values()) == {0, 8}
    assert all(tokens == continue_prompt(make_prompt(10), 4) for tokens in s.tokens.values())


def test_schedule_equal_prompts_are_not_held_back_without_a_cache():
    s = Scenario(cache_type="naive")
    for _ in range(3):
        s.submit(make_prompt(10), max_tokens=4)
    assert admitted(s) == [0, 1, 2]


def test_schedule_equal_prompts_shorter_than_a_page_start_together():
    s = Scenario()
    for _ in range(2):
        s.submit(make_prompt(4), max_tokens=4)
    assert admitted(s) == [0, 1], "the last token is computed in any case, so there is no page to wait for"


def test_schedule_prompt_that_waits_to_share_is_passed_by_others():
    s = Scenario(max_extend_tokens=8)
    s.submit(make_prompt(20), max_tokens=4)
    s.submit(make_prompt(20), max_tokens=4)
    s.submit(make_prompt(6, 500), max_tokens=4)
    assert admitted(s) == [0]
    assert admitted(s) == []
    s.answer()
    assert admitted(s) == [2]
    s.run()
    assert s.cached_tokens == {0: 0, 1: 16, 2: 0}


def test_schedule_prompt_waits_for_the_page_after_its_match_too():
    s = Scenario()
    s.submit(make_prompt(9), max_tokens=1)
    s.run()
    s.submit(make_prompt(17), max_tokens=2)
    s.submit(make_prompt(18), max_tokens=2)
    s.submit([*make_prompt(8), *make_prompt(9, 700)], max_tokens=2)
    assert admitted(s) == [1, 3]
    s.run()
    assert s.cached_tokens == {0: 0, 1: 8, 2: 16, 3: 8}


def test_abort_request_of_a_shared_prompt_lets_the_next_one_compute_it():
    s = Scenario(max_extend_tokens=8)
    first = s.submit(make_prompt(20), max_tokens=4)
    s.submit(make_prompt(20), max_tokens=4)
    s.issue()
    s.abort(first)
    s.run()
    assert s.tokens[1] == continue_prompt(make_prompt(20), 4) and s.cached_tokens[1] == 8


def test_complete_pages_computed_twice_are_freed_at_release():
    s = Scenario()
    first = s.submit(make_prompt(8), max_tokens=9)  # its second page is complete, but the last token is computed anew
    s.advance()
    second = s.submit(make_prompt(8), max_tokens=9)
    s.advance()
    assert first.page_ids[0] == second.page_ids[0] and first.page_ids[1] != second.page_ids[1]
    s.run()
    assert s.tokens[0] == s.tokens[1] == continue_prompt(make_prompt(8), 9)
    assert s.scheduler.stats().num_pages_cached == 4, "16 written tokens, held once"


def test_schedule_full_cache_gives_way_to_new_prompts():
    s = Scenario(num_pages=8)
    for i in range(6):
        s.submit(make_prompt(13, 60 * i), max_tokens=3)
        s.run()
    stats = s.scheduler.stats()
    assert stats.num_pages_free + stats.num_pages_cached == 8 and stats.num_pages_cached >= 6
    s.submit(make_prompt(13, 300), max_tokens=3)
    s.run()
    assert s.cached_tokens[6] == 12, "the latest is still there"
    assert [s.tokens[i] for i in range(6)] == [continue_prompt(make_prompt(13, 60 * i), 3) for i in range(6)]
