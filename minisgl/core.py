"""What a user states about one request (`SamplingParams`) and why it ended (`FinishReason`)."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real

# Bounds on what one request may ask for: they keep a single request from taking the engine's memory or time.
MAX_SAMPLES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_OUTPUT_TOKENS = 2**31 - 1
GREEDY_TEMPERATURE = 1e-5  # below this, dividing by the temperature leaves the range of fp32


class FinishReason(IntEnum):
    """Why a request ended. The values travel on the wire."""

    STOP = 1  # a stop id, or a stop string found by the frontend
    LENGTH = 2  # max_tokens, or the context limit
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Frozen and checked when built: a bad value raises `ValueError` that names the field and the value. Numbers may be
    numpy's; they are kept as Python's. The exact definition of each option and the order in which they apply is in
    `docs/sampling.md`.

    Args:
        temperature: 0 (anything below 1e-5) is greedy: the highest logit, the lowest id on ties.
        top_k: keep the k most likely tokens; 0 and -1 both mean all.
        top_p: keep the fewest most likely tokens that reach this probability.
        min_p: drop tokens less likely than min_p times the most likely one.
        max_tokens: at least 1; cut to the room left in the context.
        min_tokens: stop ids cannot be drawn before this many tokens.
        ignore_eos: the model's own end ids do not end the request (`stop_token_ids` still do).
        stop: text that ends the request; a str or a list of str.
        seed: makes the draws of this request repeatable, alone or in any batch.
        n: independent samples of the same prompt.
        presence_penalty, frequency_penalty: over the output. repetition_penalty: over prompt and output.
        logit_bias: token id -> value added to its logit.
        logprobs: None, or how many most likely tokens to report beside each chosen one (0 = the chosen one alone).
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 1024
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("temperature", 0.0, 1e6), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0), ("repetition_penalty", 1e-3, 1e3),
        ):  # fmt: skip
            object.__setattr__(self, name, _read_number(name, getattr(self, name), least, most))
        for name, low, high in (
            ("top_k", -1, 2**63 - 1), ("max_tokens", 1, MAX_OUTPUT_TOKENS), ("min_tokens", 0, MAX_OUTPUT_TOKENS),
            ("n", 1, MAX_SAMPLES), ("seed", -(2**63), 2**64 - 1), ("logprobs", 0, MAX_LOGPROBS),
        ):  # fmt: skip
            if getattr(self, name) is not None or name not in ("seed", "logprobs"):
                object.__setattr__(self, name, _read_int(name, getattr(self, name), low, high))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        """Turn `stop` and `stop_token_ids` into tuples, so that a later change of the caller's list has no effect."""
        if isinstance(self.stop, bytes) or not isinstance(self.stop, (Sequence, type(None))):
            raise ValueError(f"stop must be a string or a list of strings, got {self.stop!r:.60}")
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(strings)} strings, limit {MAX_STOP_STRINGS}")
        for text in strings:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_STRING_BYTES:
                raise ValueError(f"stop string {text[:40]!r}... is longer than {MAX_STOP_STRING_BYTES} bytes")
        object.__setattr__(self, "stop", strings or None)
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, (Sequence, type(None))):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(ids)} ids, limit {MAX_STOP_TOKEN_IDS}")
        ids = tuple(_read_int("stop_token_ids", token, 0, 2**31 - 1) for token in ids)
        object.__setattr__(self, "stop_token_ids", ids or None)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, limit {MAX_LOGIT_BIAS}")
        bias = {
            _read_int("logit_bias", token, 0, 2**31 - 1): _read_number("logit_bias", value, -1e4, 1e4)
            for token, value in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias or None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE


def _read_number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # nor is NaN
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value!r:.60}")
    return number


def _read_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {number}")
    return number
