"""Building `StepOutputs` entry by entry, for requests that end or ask for log-probabilities."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from minisgl.core import FinishReason
from minisgl.scheduler.request import EMPTY_OUTPUTS, NO_TOKENS, NO_VALUES, LogprobItems, Request, StepOutputs


class OutputBuilder:
    """Collects entries in order."""

    def __init__(self) -> None:
        self._entries: list[Request] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._reasons: list[int] = []
        self._logprobs: list[list[LogprobItems]] = []
        self._errors: list[str] = []

    def add(
        self,
        request: Request,
        tokens: NDArray[np.int32],
        finish_reason: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """Add an entry with the next tokens of a request. Its log-probabilities not put out so far go with it."""
        self._entries.append(request)
        self._tokens.append(tokens)
        self._reasons.append(finish_reason or 0)
        self._logprobs.append(request.logprobs)
        request.logprobs = []
        if error is not None:
            self._errors.append(error)

    def build(self) -> StepOutputs:
        if not self._entries:
            return EMPTY_OUTPUTS
        ends = zip(self._entries, self._reasons, strict=True)
        items = [item for items in self._logprobs for item in items]
        return StepOutputs(
            client_ids=np.array([request.client_id for request in self._entries], np.int64),
            request_ids=np.array([request.request_id for request in self._entries], np.uint64),
            num_tokens=np.array([len(tokens) for tokens in self._tokens], np.int32),
            finish_reasons=np.array(self._reasons, np.uint8),
            cached_tokens=np.array([request.cached_tokens if reason else 0 for request, reason in ends], np.int32),
            tokens=np.concatenate(self._tokens),
            errors=tuple(self._errors),
            num_logprobs=np.array([sum(len(i.token_ids) for i in items) for items in self._logprobs], np.int32),
            logprob_ids=np.concatenate([item.token_ids for item in items]) if items else NO_TOKENS,
            logprob_values=np.concatenate([item.values for item in items]) if items else NO_VALUES,
        )


def join_outputs(first: StepOutputs, second: StepOutputs) -> StepOutputs:
    """The entries of both, in order."""
    if not len(first):
        return second
    if not len(second):
        return first
    pairs = {f.name: (getattr(first, f.name), getattr(second, f.name)) for f in fields(StepOutputs)}
    errors = first.errors + second.errors
    columns = {name: np.concatenate(pair) for name, pair in pairs.items() if name != "errors"}
    return StepOutputs(errors=errors, **columns)
