"""Bad input is refused by name, and good input becomes the right message."""

from array import array

import numpy as np
import pytest
from tokenizers_made_here import BOS, make_byte_tokenizer, make_piece_tokenizer

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.protocol import Welcome
from minisgl.request_builder import RequestBuilder, list_params, list_prompts, mix
from minisgl.tokenizer import PromptEncoder

VOCAB, CONTEXT = 320, 64


def make_builder(tokenizer=None, *, end_ids=(7,), base_seed=0) -> RequestBuilder:
    welcome = Welcome(1, "model", VOCAB, CONTEXT, 16, 4, 8, base_seed)
    tokenizer = make_byte_tokenizer() if tokenizer is None else tokenizer
    return RequestBuilder(welcome, end_ids, PromptEncoder(tokenizer, VOCAB))


def unpack(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


@pytest.mark.parametrize(
    "prompt, parts",
    [
        ([], ["empty"]),
        ("", ["empty"]),
        (None, ["None"]),
        (5, ["5"]),
        (b"ab", ["str or a list"]),
        ({"a": 1}, ["str or a list"]),
        ([1, 9999], ["9999", "320"]),
        ([-1], ["-1", "320"]),
        ([320], ["320", "319"]),
        ([1, 2**63], [str(2**63), "320"]),
        ([-(2**40)], [str(-(2**40)), "320"]),
        ([True], ["True"]),
        ([np.True_], ["True"]),
        ([1.0], ["1.0"]),
        (["a"], ["'a'"]),
        ([2, None], ["None"]),
        ([[1]], ["[1]"]),
        ([1] * 64, ["64", "63"]),
        ("x" * 64, ["64", "63"]),
        ("\ud800", ["not valid text"]),
    ],
)
def test_pack_prompts_refuses_and_names_prompt_value_and_limit(prompt, parts):
    with pytest.raises(InvalidRequest) as caught:
        make_builder().pack_prompts([[1], [2], prompt])
    for part in ("prompt 2", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2]),
        [np.int64(1), np.int32(2)],
        array("q", [1, 2]),
        "\x01\x02",
    ],
)
def test_pack_prompts_accepts_every_kind_of_integers(prompt):
    assert unpack(make_builder().pack_prompts([prompt])[0]) == [1, 2]


@pytest.mark.parametrize(
    ("num_pages", "num_tokens", "text"),
    [
        (4, 64, "the KV pool of 4 pages holds 64 and .* or raise num_pages to at least 5$"),
        (4, 79, ".* or raise num_pages to at least 5$"),
        (4, 80, ".* or raise num_pages to at least 6$"),
        (5, 64, "the context holds 64 and .* or raise max_seq_len to at least 65 where the model can$"),
    ],
)
def test_pack_prompts_of_a_long_prompt_names_what_limits_it_and_the_least_that_works(num_pages, num_tokens, text):
    builder = RequestBuilder(Welcome(1, "m", VOCAB, CONTEXT, 16, num_pages, 8, 0), (), None)
    with pytest.raises(InvalidRequest, match=f"prompt 0 has {num_tokens} tokens, limit 63: {text}"):
        builder.pack_prompts([[1] * num_tokens])


def test_pack_prompts_of_text_and_ids_keeps_the_order():
    prompts = ["a", [5], "bc", [6, 7], ""][:4]
    assert [unpack(p) for p in make_builder().pack_prompts(prompts)] == [[97], [5], [98, 99], [6, 7]]


def test_pack_prompts_puts_bos_first_once():
    builder = make_builder(make_piece_tokenizer())
    plain, marked = (unpack(p) for p in builder.pack_prompts(["ab", f"{BOS}ab"]))
    assert plain == marked and plain.count(plain[0]) == 1


def test_pack_prompts_without_a_tokenizer_takes_ids_only():
    builder = RequestBuilder(Welcome(1, "m", VOCAB, CONTEXT, 16, 4, 8, 0), (), None)
    assert unpack(builder.pack_prompts([[1]])[0]) == [1]
    with pytest.raises(InvalidRequest, match=r"prompt 1 is text.*no tokenizer"):
        builder.pack_prompts([[1], "a"])
    with pytest.raises(InvalidRequest, match="stop"):
        builder.check_params(0, SamplingParams(stop="a"))


@pytest.mark.parametrize(
    "params", [SamplingParams(stop_token_ids=[320]), SamplingParams(logit_bias={1: 0.5, 320: 1.0})]
)
def test_check_params_with_an_unknown_id_is_refused(params):
    with pytest.raises(InvalidRequest, match=r"prompt 4: .*320.*0\.\.319"):
        make_builder().check_params(4, params)


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ("ab", ["ab"]),
        (["a", [1]], ["a", [1]]),
        ([1, 2], [[1, 2]]),
        ([np.int64(1)], [[np.int64(1)]]),
        ([True], [[True]]),
        ([1.5], [[1.5]]),
        ([], []),
        ([None], [None]),
        ([[]], [[]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2]]), [[1, 2]]),
        ([np.array([1, 2])], None),
    ],
)
def test_list_prompts_tells_one_prompt_from_many(prompts, expected):
    found = list_prompts(prompts)
    assert len(found) == 1 if expected is None else list(found) == expected


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"a": 1}])
def test_list_prompts_of_something_else_is_refused(prompts):
    with pytest.raises(InvalidRequest):
        list_prompts(prompts)


def test_list_params_of_another_number_is_refused():
    one = SamplingParams()
    assert list_params(one, 3) == [one] * 3 and list_params([one], 1) == [one]
    with pytest.raises(InvalidRequest, match=r"2 prompts but 3"):
        list_params([one] * 3, 2)
    with pytest.raises(InvalidRequest):
        list_params({"temperature": 1}, 2)


def build(builder: RequestBuilder, num_tokens: int = 4, *, stream: bool = False, **params):
    packed = array("i", [1] * num_tokens).tobytes()
    return builder.build(1, packed, SamplingParams(**params), stream=stream)


def test_build_cuts_max_tokens_to_the_room():
    assert build(make_builder(), 60, max_tokens=100).max_tokens == 4
    assert build(make_builder(), 60, max_tokens=3).max_tokens == 3


def test_build_merges_end_ids_unless_ignored():
    builder = make_builder(end_ids=(9, 7, 5000))
    assert unpack(build(builder, stop_token_ids=[3]).sampling.stop_ids) == [3, 7, 9]
    assert unpack(build(builder, stop_token_ids=[3], ignore_eos=True).sampling.stop_ids) == [3]


def test_build_normalizes_sampling():
    sampling = build(make_builder(), temperature=1e-7, top_k=-1, logprobs=5, logit_bias={3: 1}).sampling
    assert (sampling.temperature, sampling.top_k, sampling.num_logprobs) == (0.0, 0, 5)
    assert (unpack(sampling.bias_ids), array("f", sampling.bias_values).tolist()) == ([3], [1.0])
    assert build(make_builder(), temperature=1, top_k=10**9).sampling.top_k == 0
    assert type(build(make_builder(), temperature=1).sampling.temperature) is float


def test_build_streams_only_when_somebody_looks():
    assert not build(make_builder()).stream
    assert build(make_builder(), stop="a").stream
    assert build(make_builder(), stream=True).stream


def seeds(request) -> list[int]:
    return array("Q", request.seeds).tolist()


def test_build_repeats_the_draws_of_a_given_seed():
    one, two = make_builder(base_seed=1), make_builder(base_seed=2)
    build(one)  # moves the counter on
    assert seeds(build(one, seed=5, n=3)) == seeds(build(two, seed=5, n=3))
    assert seeds(build(one, seed=5)) == seeds(build(one, seed=5, n=3))[:1]
    assert len({*seeds(build(one, seed=5, n=3)), *seeds(build(one, seed=6, n=3)), *seeds(build(one, seed=-1))}) == 7


def test_build_draws_differently_for_each_unseeded_request():
    builder = make_builder()
    drawn = [seed for _ in range(5) for seed in seeds(build(builder, n=2))]
    assert len(set(drawn)) == 10 and not set(drawn) & set(seeds(build(builder, seed=0, n=16)))
    again = make_builder()
    assert [seed for _ in range(5) for seed in seeds(build(again, n=2))] == drawn


def test_mix_is_splitmix64():
    assert [mix(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
