"""Request bodies of the server, without a server."""

import pytest

from minisgl import errors
from minisgl.core import MAX_OUTPUT_TOKENS
from minisgl.server.errors import ApiError, to_api_error
from minisgl.server.openai import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    chat_logprobs,
    completion_logprobs,
    read_call,
    read_json,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000])
def test_read_json_malformed_body_is_400(body):
    with pytest.raises(ApiError) as caught:
        read_json(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "change, param",
    [
        ({"no_such_field": 1}, "no_such_field"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": "1"}, "temperature"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0]"),
    ],
)
def test_read_call_bad_field_is_named(change, param):
    with pytest.raises(ApiError) as caught:
        read_call({**CHAT, **change}, is_chat=True, defaults={})
    assert caught.value.status == 400
    assert param is None or caught.value.param == param


@pytest.mark.parametrize("prompt", [None, [], [[1], "a"], [True], [1, "a"], {}, 5])
def test_read_call_bad_prompt_is_400(prompt):
    with pytest.raises(ApiError) as caught:
        read_call({"model": "m", "prompt": prompt}, is_chat=False, defaults={})
    assert caught.value.param == "prompt"


def test_read_json_last_of_equal_keys_counts():
    assert read_json(b'{"max_tokens": 1, "max_tokens": 2}') == {"max_tokens": 2}


@pytest.mark.parametrize("is_chat", [False, True])
def test_read_call_null_is_absent(is_chat):
    required = CHAT if is_chat else TEXT
    known = {*(CHAT_FIELDS if is_chat else COMPLETION_FIELDS), *IGNORED_FIELDS, *NEUTRAL_VALUES, "no_such_field"}
    nulls = dict.fromkeys(known - required.keys())
    assert read_call({**required, **nulls}, is_chat=is_chat, defaults={}) == read_call(
        required, is_chat=is_chat, defaults={}
    )
    for name in {"messages", "prompt"} & required.keys():
        with pytest.raises(ApiError):
            read_call({**required, name: None}, is_chat=is_chat, defaults={})


def test_to_api_error_every_error_has_openais_shape():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 10
    for error in [kind("text") for kind in kinds] + [ApiError(404, "text"), ValueError("inside"), KeyError()]:
        told = to_api_error(error)
        body = told.body["error"]
        assert body.keys() == {"message", "type", "param", "code"} and 400 <= told.status < 600
        assert isinstance(body["message"], str) and isinstance(body["type"], str)
        assert body["code"] is None or isinstance(body["code"], str)
        assert "inside" not in body["message"]


def test_logprobs_tokens_that_are_parts_of_a_character():
    pieces = [b"a", *(bytes([byte]) for byte in "é".encode())]
    entries = [{"token_id": i, "logprob": -1.0, "top": [(i, -1.0)]} for i in range(3)]
    chat = chat_logprobs(entries, pieces.__getitem__)["content"]
    assert [entry["bytes"] for entry in chat] == [[97], [0xC3], [0xA9]]
    assert [entry["token"] for entry in chat] == ["a", "\ufffd", "\ufffd"]
    text = completion_logprobs(entries, pieces.__getitem__, 5)
    assert text["tokens"] == ["a", "\ufffd", "\ufffd"] and text["text_offset"] == [5, 6, 7]


def test_read_call_defaults_give_way_to_the_request():
    defaults = {"temperature": 0.6, "top_p": 0.9}
    params = read_call({**TEXT, "temperature": 0.2, "top_p": None}, is_chat=False, defaults=defaults).params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 16)
    assert read_call(CHAT, is_chat=True, defaults=defaults).params.max_tokens == MAX_OUTPUT_TOKENS


def test_read_call_neutral_and_private_fields_are_taken():
    neutral = {"tools": [], "response_format": {"type": "text"}, "user": "me", "tool_choice": "auto", "audio": None}
    assert read_call({**CHAT, **neutral}, is_chat=True, defaults={}).prompts[0] == CHAT["messages"]


def test_read_call_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = read_call({**CHAT, "messages": [{"role": "developer", "content": parts}]}, is_chat=True, defaults={})
    assert call.prompts[0] == [{"role": "system", "content": "ab"}]
