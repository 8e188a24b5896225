"""The way of one sample's tokens to the text that the caller sees: detokenized, cut at stop strings, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import FinishReason, SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.mailbox import Output

FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(slots=True)
class Delta:
    """What an output added to a sample. `token_ids` and `logprobs` go together, one for one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # only when asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0  # set with the finish reason

    def extend(self, later: "Delta") -> None:
        """Add the delta that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.cached_tokens = later.cached_tokens


class Completion:
    """Turns the outputs of one sample into deltas, in order.

    Where stop strings are given, text that may be the beginning of one is held back, and so are its tokens: the tokens
    given out are always the fewest whose text covers the text given out. Once a stop string is found, `must_abort` asks
    the caller to end the sample in the engine; its last output then brings the finish reason "stop".

    Args:
        decoder: None serves ids only: the text stays empty.
    """

    def __init__(self, params: SamplingParams, decoder: TextDecoder | None):
        self._params = params
        self._detokenizer = None if decoder is None else decoder.start(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop or ())
        self._match: StopMatch | None = None
        self._text = ""  # not given out
        self._tokens: list[_HeldToken] = []  # not given out
        self._num_characters = 0  # of all the text so far, given out or not
        self._num_covered = 0  # of them, the text of the tokens given out
        self.is_finished = False

    @property
    def must_abort(self) -> bool:
        """Whether a stop string was found that the engine does not know of."""
        return self._match is not None and not self.is_finished

    def add(self, output: Output) -> Delta:
        """The delta of one output, which may be empty; its finish reason is set when the sample is over."""
        assert not self.is_finished, "an output came after the end"
        delta = Delta(cached_tokens=output.cached_tokens)
        if output.finish_reason is not None:
            self.is_finished = True
            delta.finish_reason = FINISH_NAMES.get(output.finish_reason, "stop")
        if self._match is None:
            self._add_tokens(output, delta)
        if self._match is not None and self.is_finished:
            delta.finish_reason, delta.stop_reason = "stop", self._match.string
        return delta

    def _add_tokens(self, output: Output, delta: Delta) -> None:
        """Detokenize, look for stop strings, and move to `delta` what is certain."""
        token_ids, delta.stop_reason = strip_stop_id(output, self._params)
        logprobs = make_logprobs(token_ids, output, self._params)
        if not self._params.stop:
            delta.text, delta.token_ids, delta.logprobs = self._detokenize(token_ids), token_ids, logprobs
            return
        match = None
        for i, token_id in enumerate(token_ids):
            match = self._append("" if self._detokenizer is None else self._detokenizer.push(token_id))
            self._tokens.append(_HeldToken(token_id, self._num_characters, logprobs[i] if logprobs else None))
            if match is not None:
                break
        if match is None and self.is_finished and self._detokenizer is not None:
            match = self._append(self._detokenizer.flush())
        self._match = match
        if match is not None:
            self._give_out(delta, match.end if self._params.include_stop_str_in_output else match.start)
        elif self.is_finished:
            self._give_out(delta, self._num_characters, with_hidden_tokens=True)
        else:
            self._give_out(delta, self._num_characters - self._stops.num_pending)

    def _detokenize(self, token_ids: Sequence[int]) -> str:
        if self._detokenizer is None:
            return ""
        text = "".join(map(self._detokenizer.push, token_ids))
        return text + self._detokenizer.flush() if self.is_finished else text

    def _append(self, text: str) -> "StopMatch | None":
        self._text += text
        self._num_characters += len(text)
        return self._stops.feed(text)

    def _give_out(self, delta: Delta, end: int, *, with_hidden_tokens: bool = False) -> None:
        """Move to `delta` the text up to character `end`, and the fewest tokens that cover it, or else all tokens."""
        start = self._num_characters - len(self._text)
        delta.text, self._text = self._text[: end - start], self._text[end - start :]
        num_tokens = len(self._tokens)
        if not with_hidden_tokens:
            num_tokens = next((i + 1 for i, held in enumerate(self._tokens) if held.end >= end), num_tokens)
            if end <= self._num_covered:
                num_tokens = 0
        for held in self._tokens[:num_tokens]:
            delta.token_ids.append(held.token_id)
            if held.logprobs is not None:
                delta.logprobs.append(held.logprobs)
            self._num_covered = held.end
        del self._tokens[:num_tokens]


@dataclass(frozen=True, slots=True)
class _HeldToken:
    token_id: int
    end: int  # characters of all the text up to this token
    logprobs: dict[str, Any] | None


def complete(output: Output, params: SamplingParams, decoder: TextDecoder | None) -> Delta:
    """The delta of a sample whose one and only output this is; for samples without stop strings."""
    assert output.finish_reason is not None, "the sample goes on"
    token_ids, stop_reason = strip_stop_id(output, params)
    return Delta(
        text="" if decoder is None else decoder.decode(token_ids, skip_special_tokens=params.skip_special_tokens),
        token_ids=token_ids,
        logprobs=make_logprobs(token_ids, output, params),
        finish_reason=FINISH_NAMES[output.finish_reason],
        stop_reason=stop_reason,
        cached_tokens=output.cached_tokens,
    )


def strip_stop_id(output: Output, params: SamplingParams) -> tuple[list[int], int | None]:
    """The tokens without the stop id that ended them, and that id if the caller had asked for it."""
    token_ids = list(output.token_ids)
    if output.finish_reason is not FinishReason.STOP:
        return token_ids, None
    stop_id = token_ids.pop()
    return token_ids, stop_id if stop_id in (params.stop_token_ids or ()) else None


def make_logprobs(token_ids: Sequence[int], output: Output, params: SamplingParams) -> list[dict[str, Any]]:
    """One entry for each token; empty when none were asked for."""
    if params.logprobs is None or not token_ids:
        return []
    width = len(output.logprob_ids) // len(output.token_ids)
    entries = []
    for i, token_id in enumerate(token_ids):
        ids = output.logprob_ids[i * width : (i + 1) * width]
        values = output.logprob_values[i * width : (i + 1) * width]
        top = list(zip(ids[1:], values[1:], strict=True))
        entries.append({"token_id": token_id, "logprob": values[0], "top": top})
    return entries


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string was found, in characters from the beginning of the text."""

    start: int
    end: int
    string: str


class StopMatcher:
    """Finds the stop string that ends first; of several that end at the same character, the longest.

    The result does not depend on how the text is cut into pieces (Knuth-Morris-Pratt, one automaton for each string).
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = sorted(strings, key=len, reverse=True)
        self._fallbacks = [_make_fallbacks(string) for string in self._strings]
        self._num_matched = [0] * len(self._strings)
        self._position = 0

    @property
    def num_pending(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._num_matched, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Look at the next piece of text; nothing may be fed after a match."""
        if not self._strings:
            return None
        for character in text:
            self._position += 1
            found = None
            for i, string in enumerate(self._strings):
                matched = self._num_matched[i]
                while matched and string[matched] != character:
                    matched = self._fallbacks[i][matched]
                matched += string[matched] == character
                self._num_matched[i] = matched
                if matched == len(string) and found is None:
                    found = StopMatch(self._position - matched, self._position, string)
            if found is not None:
                return found
        return None


def _make_fallbacks(string: str) -> list[int]:
    """For each length k of a matched beginning, the next shorter one that its end could be; [len(string)] ints."""
    fallbacks = [0, 0]
    matched = 0
    for character in string[1:]:
        while matched and string[matched] != character:
            matched = fallbacks[matched]
        matched += string[matched] == character
        fallbacks.append(matched)
    return fallbacks
