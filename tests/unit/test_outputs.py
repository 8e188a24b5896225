"""Messages joined or apart, in any split, say the same of every sample."""

from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.mailbox import Output
from minisgl.outputs import join_outputs, split_outputs
from minisgl.protocol import Outputs

Entry = tuple[int, list[int], int]  # request id, tokens, finish reason


def make_message(entries: list[Entry], sequence: int = 0, widths: Mapping[int, int] | None = None) -> Outputs:
    """Entries whose cached tokens, error text and log-probabilities follow from their request id and tokens."""
    logprobs = [
        (token + k, -float(k))
        for request_id, tokens, _ in entries
        for token in tokens
        for k in range((widths or {}).get(request_id, 0))
    ]
    return Outputs(
        sequence,
        array("Q", [request_id for request_id, _, _ in entries]).tobytes(),
        array("i", [len(tokens) for _, tokens, _ in entries]).tobytes(),
        bytes(reason for _, _, reason in entries),
        array("i", [request_id % 7 if reason else 0 for request_id, _, reason in entries]).tobytes(),
        array("i", [token for _, tokens, _ in entries for token in tokens]).tobytes(),
        tuple(f"{request_id} failed" for request_id, _, reason in entries if reason == FinishReason.ERROR),
        array("i", [token for token, _ in logprobs]).tobytes(),
        array("f", [value for _, value in logprobs]).tobytes(),
    )


def collect(outputs: list[Output]) -> dict[int, tuple[Any, ...]]:
    """For each sample, all its tokens and log-probabilities, and its end."""
    found: dict[int, tuple[Any, ...]] = {}
    for output in outputs:
        tokens, ids, values, end = found.get(output.request_id, ([], [], [], None))
        assert end is None, "an output after the end"
        if output.finish_reason is not None:
            end = (output.finish_reason, output.cached_tokens, str(output.error) if output.error else None)
        found[output.request_id] = (
            tokens + list(output.token_ids), ids + list(output.logprob_ids), values + list(output.logprob_values), end,
        )  # fmt: skip
    return found


@st.composite
def draw_messages(draw: st.DrawFn) -> tuple[list[list[Entry]], dict[int, int]]:
    """Messages in which no sample goes on after its end, and the number of log-probabilities of each sample."""
    ids = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6, unique=True))
    messages: list[list[Entry]] = []
    ended: set[int] = set()
    for _ in range(draw(st.integers(1, 6))):
        message = []
        for request_id in draw(st.permutations([i for i in ids if i not in ended])):
            if draw(st.booleans()):
                reason = draw(st.sampled_from([0, 0, 0, *FinishReason]))
                message.append((request_id, draw(st.lists(st.integers(0, 2**30), max_size=3)), int(reason)))
                if reason:
                    ended.add(request_id)
        messages.append(message)
    widths = dict.fromkeys(ids, 0) if draw(st.booleans()) else {i: draw(st.integers(0, 3)) for i in ids}
    return messages, widths


@given(draw_messages())
def test_split_of_several_messages_says_what_each_alone_says(drawn):
    entries, widths = drawn
    messages = [make_message(message, i, widths) for i, message in enumerate(entries)]
    alone = [output for message in messages for output in split_outputs([message], widths.__getitem__)]
    expected = {}
    for request_id in {request_id for message in entries for request_id, _, _ in message}:
        mine = [entry for message in entries for entry in message if entry[0] == request_id]
        tokens = [token for _, tokens, _ in mine for token in tokens]
        reason = mine[-1][2]
        text = f"{request_id} failed" if reason == FinishReason.ERROR else None
        expected[request_id] = (
            tokens,
            [token + k for token in tokens for k in range(widths[request_id])],
            [-float(k) for _ in tokens for k in range(widths[request_id])],
            (FinishReason(reason), request_id % 7, text) if reason else None,
        )
    assert collect(alone) == expected
    together = split_outputs(messages, widths.__getitem__)
    assert collect(together) == expected
    if not any(widths.values()):
        ends_well = [output.request_id for output in together if output.error is None]
        assert len(set(ends_well)) == len(ends_well)
    assert collect(join_outputs(alone)) == expected


@pytest.mark.parametrize("num_messages", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": array("i", [2]).tobytes()},
        {"num_tokens": b""},
        {"num_tokens": array("i", [-1]).tobytes()},
        {"finish_reasons": b""},
        {"finish_reasons": b"\x09"},
        {"finish_reasons": bytes([FinishReason.ERROR])},
        {"cached_tokens": b""},
        {"tokens": b""},
        {"tokens": array("i", [1, 2]).tobytes()},
        {"errors": ("of nobody",)},
        {"logprob_ids": array("i", [1]).tobytes()},
        {"request_ids": array("Q", [9]).tobytes()},
    ],
)
def test_columns_that_do_not_fit_are_an_error(num_messages, changes):
    fields = {name: getattr(make_message([(1, [5], 0)]), name) for name in Outputs.__slots__}
    messages = [make_message([(1, [4], 0)])] * (num_messages - 1) + [Outputs(**{**fields, **changes})]
    with pytest.raises((ValueError, LookupError)):
        split_outputs(messages, {1: 0}.__getitem__)


@pytest.mark.parametrize("width", [0, 2])
def test_tokens_before_an_error_are_an_output_of_their_own(width):
    messages = [make_message([(1, [4], 0)], 0, {1: width}), make_message([(1, [5], FinishReason.ERROR)], 1, {1: width})]
    for outputs in (
        split_outputs(messages, {1: width}.__getitem__),
        split_outputs(messages[1:], {1: width}.__getitem__),
    ):
        *before, last = join_outputs(outputs)
        assert last.error is not None and not last.token_ids
        assert [output.error for output in before] == [None] and before[0].token_ids[-1] == 5
        assert len(before[0].logprob_ids) == width * len(before[0].token_ids)


def test_entry_after_the_end_of_its_sample_is_an_error():
    messages = [make_message([(1, [4], FinishReason.LENGTH)]), make_message([(1, [5], 0)])]
    with pytest.raises(ValueError, match="follows the end"):
        split_outputs(messages, {1: 0}.__getitem__)
