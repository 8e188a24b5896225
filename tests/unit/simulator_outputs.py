"""The scheduler's columnar outputs, entry by entry."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from minisgl.core import FinishReason
from minisgl.scheduler.request import StepOutputs
from tests.unit.simulator_ledger import expect

# Of the columns in the order of `get_columns`.
DTYPES = (np.int64, np.uint64, np.int32, np.uint8, np.int32, np.int32, np.int32, np.int32, np.float32)


@dataclass(frozen=True, slots=True)
class Entry:
    """What one request was given by one call."""

    key: tuple[int, int]
    tokens: list[int]
    reason: FinishReason | None
    cached_tokens: int
    logprob_ids: list[int]
    logprob_values: list[float]


def split_entries(outputs: StepOutputs) -> Iterator[Entry]:
    """The entries in order, after a check that all columns fit together."""
    num_tokens, num_items = outputs.num_tokens.tolist(), outputs.num_logprobs.tolist()
    tokens, ids, values = outputs.tokens.tolist(), outputs.logprob_ids.tolist(), outputs.logprob_values.tolist()
    reasons = outputs.finish_reasons.tolist()
    expect(all(column.dtype == dtype for column, dtype in zip(get_columns(outputs), DTYPES, strict=True)), "dtypes")
    expect(len(tokens) == sum(num_tokens), "columns of tokens do not fit")
    expect(len(ids) == len(values) == sum(num_items), "columns of log-probabilities do not fit")
    num_errors = reasons.count(FinishReason.ERROR)
    expect(num_errors == len(outputs.errors) and all(outputs.errors), "texts of errors do not fit")
    start = item = 0
    for client_id, request_id, count, items, reason, cached_tokens in zip(
        outputs.client_ids.tolist(), outputs.request_ids.tolist(), num_tokens, num_items, reasons,
        outputs.cached_tokens.tolist(), strict=True,
    ):  # fmt: skip
        yield Entry(
            (client_id, request_id),
            tokens[start : start + count],
            FinishReason(reason) if reason else None,
            cached_tokens,
            ids[item : item + items],
            values[item : item + items],
        )
        start, item = start + count, item + items


def update_digest(digest: int, outputs: StepOutputs) -> int:
    """A digest that these outputs change."""
    for column in get_columns(outputs):
        digest = crc32(column.tobytes(), digest)
    return digest


def get_columns(outputs: StepOutputs) -> tuple[NDArray[Any], ...]:
    return (
        outputs.client_ids, outputs.request_ids, outputs.num_tokens, outputs.finish_reasons, outputs.tokens,
        outputs.cached_tokens, outputs.num_logprobs, outputs.logprob_ids, outputs.logprob_values,
    )  # fmt: skip
