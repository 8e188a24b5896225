"""Checks what a caller asks for and makes the wire's requests of it. Nothing wrong gets past here.

Every error is an `InvalidRequest` whose text names the prompt's index, the value and the limit.
"""

import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from numbers import Number
from typing import Any

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.protocol import NewRequest, Sampling, Welcome
from minisgl.tokenizer import PromptEncoder, check_text

ENCODE_BATCH = 256  # texts that the tokenizer gets at once
MASK_64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
UNSEEDED = 0x6D696E6973676C00  # keeps the draws of unseeded requests apart from those of small given seeds


class RequestBuilder:
    """Thread-safe.

    Args:
        welcome: the engine's limits and its base seed.
        end_ids: the model's own end ids.
        encoder: None where the model has no tokenizer; then prompts are ids.
    """

    def __init__(self, welcome: Welcome, end_ids: Iterable[int], encoder: PromptEncoder | None):
        self._vocab_size = welcome.vocab_size
        self._num_pages, self._page_size = welcome.num_pages, welcome.page_size
        self._context_tokens = welcome.context_limit_tokens
        self._end_ids = [end_id for end_id in end_ids if end_id < welcome.vocab_size]
        self._encoder = encoder
        self._base_seed = mix(welcome.base_seed, UNSEEDED)
        self._request_counter = count()

    def pack_prompts(self, prompts: Sequence[object]) -> list[bytes]:
        """The ids of each prompt, [num_tokens] i32 little-endian each. A str is encoded; ids are checked."""
        packed = [b""] * len(prompts)
        texts: list[int] = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                texts.append(i)
            else:
                packed[i] = self.pack_ids(i, prompt)
        for start in range(0, len(texts), ENCODE_BATCH):
            places = texts[start : start + ENCODE_BATCH]
            encoded = self._encode(places, [str(prompts[i]) for i in places])
            for i, ids in zip(places, encoded, strict=True):
                packed[i] = self.pack_ids(i, ids)
        return packed

    def pack_ids(self, index: int, ids: object) -> bytes:
        """Check one prompt's ids and pack them."""
        if hasattr(ids, "tolist"):  # arrays and tensors
            ids = ids.tolist()
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
            raise InvalidRequest(f"prompt {index} must be a str or a list of token ids, got {ids!r:.60}")
        if not ids:
            raise InvalidRequest(f"prompt {index} is empty; it must have at least one token")
        if len(ids) >= self._context_tokens:
            raise self._too_long(index, len(ids))
        try:
            if set(map(type, ids)) != {int}:
                ids = [self._read_id(index, token_id) for token_id in ids]
            packed = array("i", ids)
        except OverflowError:
            raise self._out_of_range(index, max(ids, key=abs)) from None
        if min(packed) < 0 or max(packed) >= self._vocab_size:
            raise self._out_of_range(index, min(packed) if min(packed) < 0 else max(packed))
        return packed.tobytes()

    def check_params(self, index: int, params: object) -> SamplingParams:
        """The params of one prompt, fit for this model."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling params {index} must be SamplingParams, got {params!r:.60}")
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= self._vocab_size:
                    raise InvalidRequest(
                        f"prompt {index}: {name} holds {token_id}, the vocabulary has {self._vocab_size} ids "
                        f"(0..{self._vocab_size - 1})"
                    )
        if params.stop and self._encoder is None:
            raise InvalidRequest(f"prompt {index}: stop needs a tokenizer, and the model has none; use stop_token_ids")
        return params

    def build(self, first_id: int, prompt_ids: bytes, params: SamplingParams, *, stream: bool) -> NewRequest:
        """The wire's request; sample i has the id first_id + i. `max_tokens` is cut to the room in the context."""
        room = self._context_tokens - len(prompt_ids) // 4
        number = next(self._request_counter)
        seed = mix(self._base_seed, number) if params.seed is None else params.seed & MASK_64
        return NewRequest(
            request_id=first_id,
            prompt_ids=prompt_ids,
            seeds=array("Q", [mix(seed, i) for i in range(params.n)]).tobytes(),
            max_tokens=min(params.max_tokens, room),
            sampling=self._make_sampling(params),
            # The frontend looks for stop strings, so it must see the tokens as they come.
            stream=stream or params.stop is not None,
        )

    def _make_sampling(self, params: SamplingParams) -> Sampling:
        own_ends = [] if params.ignore_eos else self._end_ids
        bias = params.logit_bias or {}
        return Sampling(
            temperature=0.0 if params.is_greedy else float(params.temperature),
            top_k=0 if params.top_k >= self._vocab_size else max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            min_tokens=params.min_tokens,
            stop_ids=array("i", sorted({*own_ends, *(params.stop_token_ids or ())})).tobytes(),
            bias_ids=array("i", bias.keys()).tobytes(),
            bias_values=array("f", bias.values()).tobytes(),
            num_logprobs=None if params.logprobs is None else min(params.logprobs, self._vocab_size),
        )

    def _encode(self, places: list[int], texts: list[str]) -> list[list[int]]:
        if self._encoder is None:
            raise InvalidRequest(f"prompt {places[0]} is text, but the model has no tokenizer; give token ids")
        for i, text in zip(places, texts, strict=True):
            check_text(f"prompt {i}", text)
        return self._encoder.encode(texts)

    def _read_id(self, index: int, token_id: Any) -> int:
        """An int from any integer type, such as numpy's; but True is no token id."""
        if not isinstance(token_id, bool):
            try:
                return operator.index(token_id)
            except TypeError:
                pass
        raise InvalidRequest(f"prompt {index}: {token_id!r:.60} is not a token id")

    def _too_long(self, index: int, num_tokens: int) -> InvalidRequest:
        num_pages, page_size = self._num_pages, self._page_size
        what = f"the context holds {self._context_tokens}"
        way_out = f"raise max_seq_len to at least {num_tokens + 1} where the model can"
        if num_pages * page_size == self._context_tokens:
            what = f"the KV pool of {num_pages} pages holds {self._context_tokens}"
            way_out = f"raise num_pages to at least {num_tokens // page_size + 1}"
        return InvalidRequest(
            f"prompt {index} has {num_tokens} tokens, limit {self._context_tokens - 1}: {what} and one must be left to "
            f"generate; shorten the prompt, or {way_out}"
        )

    def _out_of_range(self, index: int, token_id: int) -> InvalidRequest:
        return InvalidRequest(
            f"prompt {index}: token id {token_id} is out of range, the vocabulary has {self._vocab_size} ids "
            f"(0..{self._vocab_size - 1})"
        )


def list_prompts(prompts: object) -> Sequence[object]:
    """The prompts of a call: a str or a list of ids is one prompt, any other sequence is a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array of ids, or a matrix of them
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(f"prompts must be a str, a list of str, or token ids, got {prompts!r:.60}")
    if prompts and isinstance(prompts[0], Number):
        return [prompts]
    return prompts


def check_single(prompt: object) -> None:
    """Refuse a list of prompts where one is wanted; what else is wrong shows when the prompt is packed."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Sequence):
        raise InvalidRequest(
            f"one prompt is wanted, a str or a list of token ids, got a list of {len(prompt)} prompts; call once for "
            "each, or use generate"
        )


def list_params(params: object, num_prompts: int) -> Sequence[object]:
    """One params object for each prompt."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise InvalidRequest(f"sampling_params must be SamplingParams or a list of them, got {params!r:.60}")
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts but {len(params)} sampling_params; give one, or one for each prompt"
        )
    return params


def mix(seed: int, index: int) -> int:
    """A 64-bit seed for the index-th of many draws from `seed` (the splitmix64 generator, jumped to)."""
    z = (seed + (index + 1) * GOLDEN_GAMMA) & MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK_64
    return z ^ (z >> 31)
