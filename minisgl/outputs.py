"""From the engine's messages of new tokens to few `Output`s: a reader that falls behind gets fewer and longer ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import MinisglError
from minisgl.mailbox import Output
from minisgl.protocol import Outputs

GOES_ON = 0  # as a finish reason on the wire


def split_outputs(messages: Sequence[Outputs], get_num_logprob_items: Callable[[int], int]) -> list[Output]:
    """One Output for each entry; without log-probabilities, one for each sample of all the messages together.

    Args:
        messages: in the order in which they were sent.
        get_num_logprob_items: for a request id, how many items it has for each token. Raises LookupError if the id is
            unknown.

    Raises:
        ValueError, LookupError: the columns do not fit together, or name what is unknown.
    """
    if len(messages) > 1:
        if any(message.logprob_ids or message.logprob_values for message in messages):
            return [output for message in messages for output in split_outputs([message], get_num_logprob_items)]
        messages = [_join_messages(messages)]
    return _split_message(messages[0], get_num_logprob_items)


def _split_message(message: Outputs, get_num_logprob_items: Callable[[int], int]) -> list[Output]:
    request_ids = np.frombuffer(message.request_ids, "<u8").tolist()
    tokens: list[int] = np.frombuffer(message.tokens, "<i4").tolist()
    counts = np.frombuffer(message.num_tokens, "<i4").tolist()
    cached = np.frombuffer(message.cached_tokens, "<i4").tolist()
    logprob_ids: list[int] = np.frombuffer(message.logprob_ids, "<i4").tolist()
    logprob_values: list[float] = np.frombuffer(message.logprob_values, "<f4").tolist()
    errors = list(message.errors)
    outputs: list[Output] = []
    start = logprob_start = 0
    for request_id, count, code, num_cached in zip(request_ids, counts, message.finish_reasons, cached, strict=True):
        end, logprob_end = start + count, logprob_start + count * get_num_logprob_items(request_id)
        reason = None if code == GOES_ON else FinishReason(code)
        error = MinisglError(errors.pop(0)) if reason is FinishReason.ERROR else None
        if error is not None and count:  # a reader raises the error, so the tokens before it go ahead
            values = logprob_ids[logprob_start:logprob_end], logprob_values[logprob_start:logprob_end]
            outputs.append(Output(request_id, tokens[start:end], None, 0, *values))
            start, logprob_start = end, logprob_end
        outputs.append(
            Output(
                request_id, tokens[start:end], reason, num_cached, logprob_ids[logprob_start:logprob_end],
                logprob_values[logprob_start:logprob_end], error,
            )
        )  # fmt: skip
        start, logprob_start = end, logprob_end
    if start != len(tokens) or not len(logprob_ids) == len(logprob_values) == logprob_start or errors:
        raise ValueError(
            f"{len(tokens)} tokens for {start}, {len(logprob_ids)} log-probabilities for {logprob_start}, "
            f"{len(errors)} errors too many"
        )
    return outputs


def join_outputs(outputs: Sequence[Output]) -> list[Output]:
    """The same with one `Output` for each sample, in the order of their first; an error stays apart."""
    by_sample: dict[int, list[Output]] = {}
    for output in outputs:
        by_sample.setdefault(output.request_id, []).append(output)
    return [joined for parts in by_sample.values() for joined in _join_parts(parts)]


def _join_parts(parts: list[Output]) -> list[Output]:
    last = parts[-1]
    if len(parts) == 1:
        return parts
    if last.error is not None:
        return [*_join_parts(parts[:-1]), last]
    return [
        last._replace(
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            logprob_ids=[token_id for part in parts for token_id in part.logprob_ids],
            logprob_values=[value for part in parts for value in part.logprob_values],
        )
    ]


def _join_messages(messages: Sequence[Outputs]) -> Outputs:
    """One message with one entry for each sample, sorted by request id; for messages without log-probabilities."""

    def column(name: str, kind: str) -> np.ndarray[Any, np.dtype[Any]]:
        return np.frombuffer(b"".join(getattr(message, name) for message in messages), kind)

    request_ids, tokens = column("request_ids", "<u8"), column("tokens", "<i4")
    counts, reasons = column("num_tokens", "<i4"), column("finish_reasons", "u1")
    cached = column("cached_tokens", "<i4")
    if not len(request_ids) == len(counts) == len(reasons) == len(cached) or counts.sum() != len(tokens):
        raise ValueError("the columns have different lengths")
    if not len(request_ids):
        return messages[-1]
    order = np.argsort(request_ids, kind="stable")
    sorted_ids, lengths = request_ids[order], counts[order]
    firsts = np.flatnonzero(np.append(True, sorted_ids[1:] != sorted_ids[:-1]))
    lasts = np.append(firsts[1:], len(order)) - 1
    # Token i of the result is at `sources[i]`: where its entry began, plus its place in it.
    begins = (np.cumsum(counts) - counts)[order]
    sources = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(len(tokens))
    if np.count_nonzero(reasons[order][lasts]) != np.count_nonzero(reasons):
        raise ValueError("an entry follows the end of its sample")
    errors = [text for message in messages for text in message.errors]
    if len(errors) != np.count_nonzero(reasons == FinishReason.ERROR):
        raise ValueError(f"{len(errors)} errors for {np.count_nonzero(reasons == FinishReason.ERROR)} samples")
    failed = np.argsort(request_ids[reasons == FinishReason.ERROR], kind="stable")
    return replace(
        messages[-1],
        request_ids=sorted_ids[firsts].tobytes(),
        num_tokens=np.add.reduceat(lengths, firsts).astype("<i4").tobytes(),
        finish_reasons=reasons[order][lasts].tobytes(),
        cached_tokens=cached[order][lasts].tobytes(),
        tokens=tokens[sources].tobytes(),
        errors=tuple(errors[i] for i in failed),
    )
