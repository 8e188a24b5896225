"""Text from tokens: stop strings are cut exactly, whatever the borders of the outputs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made_here import BOS, make_byte_tokenizer

from minisgl.completion import Completion, Delta, StopMatcher, complete
from minisgl.core import FinishReason, SamplingParams
from minisgl.detokenizer import REPLACEMENT, TextDecoder
from minisgl.mailbox import Output

DECODER = TextDecoder(make_byte_tokenizer())
BOS_ID = make_byte_tokenizer().backend_tokenizer.token_to_id(BOS)


def run(params: SamplingParams, chunks: list[list[int]], end: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    """Deltas of a sample whose tokens come in these chunks; the engine aborts when it is asked to."""
    completion = Completion(params, DECODER)
    deltas = []
    for i, chunk in enumerate(chunks):
        finish = end if i == len(chunks) - 1 else None
        deltas.append(completion.add(Output(1, chunk, finish, cached_tokens=3 if finish else 0)))
        if completion.must_abort:
            deltas.append(completion.add(Output(1, [120], FinishReason.ABORT, cached_tokens=3)))
        if completion.is_finished:
            break
    assert completion.is_finished and [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return deltas


def joined(deltas: list[Delta]) -> Delta:
    whole = Delta()
    for delta in deltas:
        whole.extend(delta)
    return whole


def one_by_one(text: str) -> list[list[int]]:
    return [[byte] for byte in text.encode()]


@pytest.mark.parametrize(
    "chunks", [one_by_one("hello world"), [list(b"hello world")], [list(b"hello wo"), list(b"rld")]]
)
def test_stop_string_is_cut_whatever_the_chunks(chunks):
    whole = joined(run(SamplingParams(stop="lo w"), chunks))
    assert (whole.text, bytes(whole.token_ids)) == ("hel", b"hel")
    assert (whole.finish_reason, whole.stop_reason, whole.cached_tokens) == ("stop", "lo w", 3)


def test_stop_string_may_be_included():
    whole = joined(run(SamplingParams(stop=["lo w"], include_stop_str_in_output=True), one_by_one("hello world")))
    assert (whole.text, bytes(whole.token_ids), whole.stop_reason) == ("hello w", b"hello w", "lo w")


def test_beginning_of_a_stop_string_is_held_back_and_given_out_after_all():
    deltas = run(SamplingParams(stop="abc"), one_by_one("xabab"))
    assert [d.text for d in deltas] == ["x", "", "", "ab", "ab"]
    assert [bytes(d.token_ids) for d in deltas] == [b"x", b"", b"", b"ab", b"ab"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)


def test_first_stop_string_to_be_complete_wins_and_then_the_longest():
    assert joined(run(SamplingParams(stop=["cd", "bcd", "zz"]), one_by_one("abcd"))).stop_reason == "bcd"
    assert joined(run(SamplingParams(stop=["abcd", "b"]), one_by_one("abcd"))).stop_reason == "b"


def test_stop_string_at_the_very_end_wins_over_the_length():
    deltas = run(SamplingParams(stop="d"), [list(b"abcd")])
    assert len(deltas) == 1 and (deltas[0].text, deltas[0].finish_reason) == ("abc", "stop")


def test_stop_string_across_a_hidden_token_is_found():
    whole = joined(run(SamplingParams(stop="bc"), [[97], [98], [BOS_ID], [99], [100]]))
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("a", [97], "bc")


def test_hidden_tokens_at_the_end_are_given_out_with_stop_strings_too():
    whole = joined(run(SamplingParams(stop="zz"), [[97], [BOS_ID]]))
    assert (whole.text, whole.token_ids) == ("a", [97, BOS_ID])


def test_stop_string_in_the_rest_at_the_end_is_found():
    deltas = run(SamplingParams(stop=REPLACEMENT), [[97], [0xE3]])
    assert (joined(deltas).text, deltas[-1].finish_reason, deltas[-1].stop_reason) == ("a", "stop", REPLACEMENT)


@pytest.mark.parametrize(
    "text, string, start",
    [("aaab", "aab", 1), ("abababc", "ababc", 2), ("aabaabaaa", "aabaaa", 3), ("abc", "abcd", None)],
)
def test_stop_matcher_falls_back_to_shorter_beginnings(text, string, start):
    found = StopMatcher([string]).feed(text)
    assert (None if found is None else found.start) == start


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_matcher_agrees_with_a_search_by_hand(text, strings, data):
    ends = sorted((text.find(s) + len(s), -len(s), s) for s in strings if s in text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    matcher, found = StopMatcher(strings), None
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found = matcher.feed(text[start:end])
        if found is not None:
            break
        held = max((n for s in strings for n in range(len(s)) if text[:end].endswith(s[:n])), default=0)
        assert matcher.num_pending == held
    if ends:
        end, size, string = ends[0]
        assert found is not None and (found.start, found.end, found.string) == (end + size, end, string)
    else:
        assert found is None


def test_stop_id_is_left_out_and_named_only_if_asked_for():
    output = Output(1, [97, 98, 99], FinishReason.STOP, logprob_ids=[97, 98, 99], logprob_values=[-1.0, -2.0, -3.0])
    asked = SamplingParams(stop_token_ids=[99], logprobs=0)
    for delta in (complete(output, asked, DECODER), Completion(asked, DECODER).add(output)):
        assert (delta.text, delta.token_ids, delta.stop_reason) == ("ab", [97, 98], 99)
        assert [entry["token_id"] for entry in delta.logprobs] == [97, 98]
    own = complete(output, SamplingParams(), DECODER)
    assert (own.text, own.finish_reason, own.stop_reason) == ("ab", "stop", None)


def test_stop_id_alone_gives_no_text():
    delta = Completion(SamplingParams(), DECODER).add(Output(1, [99], FinishReason.STOP))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "stop")


def test_log_probabilities_go_with_their_tokens():
    ids, values = [97, 5, 6, 98, 7, 8], [-1.0, -0.5, -0.75, -2.0, -0.25, -0.125]
    delta = complete(Output(1, [97, 98], FinishReason.LENGTH, 0, ids, values), SamplingParams(logprobs=2), DECODER)
    assert delta.logprobs == [
        {"token_id": 97, "logprob": -1.0, "top": [(5, -0.5), (6, -0.75)]},
        {"token_id": 98, "logprob": -2.0, "top": [(7, -0.25), (8, -0.125)]},
    ]


def test_completion_without_a_tokenizer_gives_ids():
    completion = Completion(SamplingParams(), None)
    delta = completion.add(Output(1, [5, 6], FinishReason.LENGTH))
    assert (delta.text, delta.token_ids) == ("", [5, 6])
    assert complete(Output(1, [5, 6], FinishReason.LENGTH), SamplingParams(), None).text == ""


@pytest.mark.parametrize("skip", [True, False])
def test_skip_special_tokens_rules_the_text(skip):
    delta = Completion(SamplingParams(skip_special_tokens=skip), DECODER).add(
        Output(1, [97, BOS_ID, 98], FinishReason.LENGTH)
    )
    assert delta.text == ("ab" if skip else f"a{BOS}b")
