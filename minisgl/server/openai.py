"""The wire shapes of OpenAI's API: reading request bodies, and the parts of replies."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import MAX_OUTPUT_TOKENS, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.server.errors import bad_request
from minisgl.tokenizer import join_parts

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chat has none
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls", "refusal")

SAMPLING_FIELDS = frozenset((
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "seed", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens", "include_stop_str_in_output",
))  # fmt: skip
COMMON_FIELDS = SAMPLING_FIELDS | {"model", "max_tokens", "stream", "stream_options", "logit_bias", "logprobs"}
COMPLETION_FIELDS = COMMON_FIELDS | {"prompt"}
CHAT_FIELDS = COMMON_FIELDS | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
# Notes of the client to itself or to its provider; they change no answer.
IGNORED_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Known to OpenAI's clients and not offered here: only values that ask for nothing are taken.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "modalities": (["text"],),
    "functions": ([],), "function_call": ("none", "auto"), "audio": (), "prediction": (), "reasoning_effort": (),
    "web_search_options": (), "verbosity": (), "prompt_logprobs": (), "add_special_tokens": (True,),
    "chat_template": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked as far as that goes without a tokenizer."""

    is_chat: bool
    prompts: tuple[Any, ...]  # each a str or a list of ids; of a chat, the list of messages
    params: SamplingParams
    is_stream: bool
    include_usage: bool
    template_options: Mapping[str, Any] | None


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises ApiError for anything that is not strict JSON of an object."""
    try:
        values = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise bad_request(f"the body must be a JSON object, got {type(values).__name__}")
    return values


def read_call(values: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any]) -> Call:
    """Check a request's fields.

    Args:
        defaults: sampling options of requests that do not state them.

    Raises:
        ApiError: 400, names the field.
    """
    values = {name: value for name, value in values.items() if value is not None}
    _check_names(values, CHAT_FIELDS if is_chat else COMPLETION_FIELDS)
    is_stream = _flag(values, "stream")
    include_usage = False
    if (options := values.get("stream_options")) is not None:
        if not is_stream:
            raise bad_request("stream_options is allowed only with stream", "stream_options")
        if not isinstance(options, dict) or options.keys() - {"include_usage"}:
            raise bad_request(f"stream_options must be {{include_usage: bool}}, got {options!r:.60}", "stream_options")
        include_usage = _flag(options, "include_usage")
    template_options = values.get("chat_template_kwargs")
    if template_options is not None and not isinstance(template_options, dict):
        raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
    prompts = (read_messages(values.get("messages")),) if is_chat else read_prompts(values.get("prompt"))
    params = _read_params(values, is_chat=is_chat, defaults=defaults)
    return Call(is_chat, prompts, params, is_stream, include_usage, template_options)


def read_prompts(prompt: object) -> tuple[Any, ...]:
    """The prompts of a text completion: str, list of str, ids, or list of ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return (prompt,)
        if all(isinstance(item, str) for item in prompt):
            return tuple(prompt)
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return tuple(prompt)
    raise bad_request(
        "prompt must be text, a list of texts, a list of token ids, or a list of such lists, and not empty; "
        f"got {prompt!r:.60}",
        "prompt",
    )


def read_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation, each content as one text. `developer` is OpenAI's newer name for `system`."""
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages must be a list of messages, and not empty; got {messages!r:.60}", "messages")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def make_usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def chat_logprobs(entries: Sequence[Mapping[str, Any]], get_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """Args: get_bytes: what a token stands for, maybe a part of a character."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        data = get_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**describe(e["token_id"], e["logprob"]), "top_logprobs": [describe(*pair) for pair in e["top"]]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[Mapping[str, Any]], get_bytes: Callable[[int], bytes], offset: int
) -> dict[str, Any]:
    """Args: offset: characters of the sample's text before these tokens."""

    def name(token_id: int) -> str:
        return get_bytes(token_id).decode(errors="replace")

    tokens = [name(entry["token_id"]) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{name(i): value for i, value in entry["top"]} for entry in entries],
        "text_offset": offsets,
    }


def _read_message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise bad_request(f"{place} must be an object with a role of {', '.join(ROLES)}; got {message!r:.60}", place)
    if unknown := message.keys() - set(MESSAGE_FIELDS):
        raise bad_request(f"{place} has the unknown field {sorted(unknown)[0]!r}", place)
    try:
        content = join_parts(f"{place}.content", message.get("content"))
    except InvalidRequest as error:
        raise bad_request(str(error), place) from None
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise bad_request(f"{place}.content must be text or a list of text parts, got {content!r:.60}", place)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{place}.content is not valid text: {error}", place) from None
    kept = {name: value for name, value in message.items() if value is not None and name != "refusal"}
    return {**kept, "role": "system" if message["role"] == "developer" else message["role"], "content": content}


def _read_params(values: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any]) -> SamplingParams:
    options = {**defaults, **{name: value for name, value in values.items() if name in SAMPLING_FIELDS}}
    limits = [name for name in ("max_tokens", "max_completion_tokens") if name in values]
    if len(limits) == 2 and values["max_tokens"] != values["max_completion_tokens"]:
        raise bad_request("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    unstated = MAX_OUTPUT_TOKENS if is_chat else COMPLETION_MAX_TOKENS
    options["max_tokens"] = values[limits[0]] if limits else unstated
    if "logit_bias" in values:
        options["logit_bias"] = _read_bias(values["logit_bias"])
    if is_chat:
        options["logprobs"] = values.get("top_logprobs", 0) if _flag(values, "logprobs") else None
        if options["logprobs"] is None and "top_logprobs" in values:
            raise bad_request("top_logprobs is allowed only with logprobs", "top_logprobs")
    else:
        options["logprobs"] = values.get("logprobs")
    try:
        return SamplingParams(**options)
    except (ValueError, TypeError) as error:
        raise bad_request(str(error), _find_param(str(error), values)) from None


def _check_names(values: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    for name, value in values.items():
        if name in known or name in IGNORED_FIELDS:
            continue
        if name not in NEUTRAL_VALUES:
            raise bad_request(f"unknown field {name!r:.60}", name[:60])
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name]):
            raise bad_request(f"{name} = {value!r:.60} is not supported", name)


def _read_bias(bias: object) -> dict[int, Any]:
    if not isinstance(bias, dict) or not all(key.isascii() and key.isdigit() and len(key) < 12 for key in bias):
        raise bad_request(f"logit_bias must map token ids to numbers, got {bias!r:.60}", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, got {value!r:.60}", name)
    return bool(value)


def _find_param(message: str, values: Mapping[str, Any]) -> str | None:
    return next((name for name in values if message.startswith(name)), None)


def _refuse_constant(name: str) -> object:
    raise InvalidRequest(f"{name} is not JSON")
