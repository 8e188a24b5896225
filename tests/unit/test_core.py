"""SamplingParams: what is accepted, refused, and kept."""

import dataclasses

import numpy as np
import pytest

from minisgl.core import MAX_LOGIT_BIAS, MAX_SAMPLES, MAX_STOP_STRINGS, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", True), ("temperature", "1"),
        ("temperature", None), ("top_p", -0.01), ("top_p", 1.01), ("top_p", NAN), ("min_p", -1), ("min_p", 1.5),
        ("top_k", -2), ("top_k", 1.0), ("top_k", True), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", None),
        ("max_tokens", 2**31), ("max_tokens", "5"), ("min_tokens", -1), ("n", 0), ("n", MAX_SAMPLES + 1), ("n", True),
        ("seed", 1.5), ("seed", 2**64), ("seed", True), ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
        ("presence_penalty", NAN), ("frequency_penalty", INF), ("repetition_penalty", 0.0), ("ignore_eos", 1),
        ("skip_special_tokens", None), ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", b"ab"), ("stop", {"a": 1}),
        ("temperature", 10**400), ("repetition_penalty", 10**400), ("logit_bias", {1: 10**400}), ("stop", [1]),
        ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "x" * 257), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", [2**31]),
        ("stop_token_ids", "12"), ("stop_token_ids", [1] * 65), ("logit_bias", {"1": 1.0}), ("logit_bias", {1: NAN}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", [1]), ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ],
)  # fmt: skip
def test_bad_value_names_the_field(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 1e6), ("top_p", 0.0), ("top_p", 1), ("top_k", 0), ("top_k", 10**9),
        ("max_tokens", 1), ("n", MAX_SAMPLES), ("seed", 0), ("seed", 2**64 - 1), ("seed", -1), ("logprobs", 0),
        ("logprobs", 20), ("min_tokens", 5), ("logit_bias", {7: -100}),
    ],
)  # fmt: skip
def test_bounds_are_accepted_and_kept(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", np.int64(5), 5), ("top_k", np.int32(-1), -1), ("n", np.uint8(2), 2), ("seed", np.int64(-3), -3),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1), ("logprobs", np.int16(0), 0), ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.25), 0.25), ("temperature", np.float16(0.5), 0.5), ("temperature", np.int64(1), 1.0),
        ("stop_token_ids", [np.int64(4), 5], (4, 5)), ("logit_bias", {np.int64(3): np.float32(0.5)}, {3: 0.5}),
    ],
)  # fmt: skip
def test_numbers_of_numpy_are_kept_as_pythons(name: str, value: object, expected: object) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == expected and repr(kept) == repr(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", np.True_),
        ("temperature", np.True_),
        ("ignore_eos", np.True_),
        ("max_tokens", np.float32(5)),
        ("max_tokens", np.int64(0)),
        ("temperature", np.float32("nan")),
        ("temperature", np.array([0.5])),
        ("seed", np.array([1])),
        ("logit_bias", {np.True_: 1.0}),
        ("stop_token_ids", [np.int64(-1)]),
    ],
)
def test_bad_value_of_numpy_names_the_field(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_lists_are_copied_so_that_later_changes_have_no_effect() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b"), ids.append(2), bias.update({3: 1.0})
    assert params == SamplingParams(stop="a", stop_token_ids=(1,), logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (0.7, False)])
def test_tiny_temperature_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy
