"""An `Answer` as a reply's JSON, or as the events of a stream."""

import json
from collections.abc import AsyncIterator
from typing import Any

from minisgl.server.errors import to_api_error
from minisgl.server.service import Answer

DONE = b"data: [DONE]\n\n"


async def make_reply(answer: Answer) -> dict[str, Any]:
    """Wait for all samples; the body of the reply."""
    num_samples = len(answer.streams) * answer.call.params.n
    choices = [_empty_choice(answer, i) for i in range(num_samples)]
    texts: list[list[str]] = [[] for _ in range(num_samples)]
    async for delta in answer.deltas():
        choice = choices[delta["index"]]
        texts[delta["index"]].append(delta["text"])
        choice["finish_reason"] = delta["finish_reason"]
        if (logprobs := answer.logprobs(delta)) is not None:
            _join(choice["logprobs"], logprobs)
    for choice, parts in zip(choices, texts, strict=True):
        if answer.call.is_chat:
            choice["message"]["content"] = "".join(parts)
        else:
            choice["text"] = "".join(parts)
    kind = "chat.completion" if answer.call.is_chat else "text_completion"
    return {**_head(answer, kind), "choices": choices, "usage": answer.usage()}


async def make_events(answer: Answer) -> AsyncIterator[bytes]:
    """The events of a stream. The first comes with the first token, so that a refusal still has its status.

    Raises:
        MinisglError: before the first event. Later errors are events.
    """
    head = _head(answer, "chat.completion.chunk" if answer.call.is_chat else "text_completion")
    usage = {"usage": None} if answer.call.include_usage else {}
    begun: set[int] = set()
    try:
        async for delta in answer.deltas():
            events = []
            if answer.call.is_chat and delta["index"] not in begun:
                first = {"index": delta["index"], "delta": {"role": "assistant", "content": ""}}
                events.append({**head, "choices": [{**first, "logprobs": None, "finish_reason": None}], **usage})
            begun.add(delta["index"])
            events += [{**head, "choices": [choice], **usage} for choice in _delta_choices(answer, delta)]
            yield b"".join(_frame(event) for event in events)
        if answer.call.include_usage:
            yield _frame({**head, "choices": [], "usage": answer.usage()})
        yield DONE
    except Exception as error:
        if not begun:
            raise
        yield _frame(to_api_error(error).body)


def _delta_choices(answer: Answer, delta: dict[str, Any]) -> list[dict[str, Any]]:
    reason = delta["finish_reason"]
    logprobs = answer.logprobs(delta)
    if not answer.call.is_chat:
        choice = {"index": delta["index"], "text": delta["text"], "logprobs": logprobs, "finish_reason": reason}
        return [choice]
    choices: list[dict[str, Any]] = []
    if delta["text"] or delta["token_ids"]:
        content = {"index": delta["index"], "delta": {"content": delta["text"]}, "logprobs": logprobs}
        choices.append({**content, "finish_reason": None})
    if reason is not None:
        choices.append({"index": delta["index"], "delta": {}, "logprobs": None, "finish_reason": reason})
    return choices


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.service.model_name,
        "system_fingerprint": None,
    }


def _empty_choice(answer: Answer, index: int) -> dict[str, Any]:
    logprobs: dict[str, Any] | None = None
    if answer.call.params.logprobs is not None:
        logprobs = (
            {"content": [], "refusal": None}
            if answer.call.is_chat
            else {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        )
    if answer.call.is_chat:
        return {"index": index, "message": {"role": "assistant", "content": "", "refusal": None}, "logprobs": logprobs}
    return {"index": index, "text": "", "logprobs": logprobs}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, values in part.items():
        if values is not None:
            whole[name] += values


def _frame(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
