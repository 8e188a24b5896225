"""Turns token ids into text one by one, without ever giving out half a character.

Joined, the pieces are what `tokenizer.decode` makes of all the ids at once. Three kinds of tokenizer need three ways:
byte-level BPE (Llama 3, Qwen) and word pieces with byte fallback (Llama 2, Mistral, Gemma) are decoded here, token by
token in constant time; any other decoder is asked again for a short window of tokens.
"""

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes: what is still broken after 8 tokens stays broken


class Detokenizer(Protocol):
    """The text of one sample, so far."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """The rest, when no token follows."""
        ...


class TextDecoder:
    """Makes detokenizers for one tokenizer; thread-safe.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any):
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._tokens: dict[int, str] = {}  # what was asked for so far; "" for ids that the tokenizer does not know
        self._token_bytes: dict[int, bytes] = {}
        state = self._backend.decoder.__getstate__() if self._backend.decoder is not None else b"{}"
        self._decoder = json.loads(state)
        self._piece_rules = _match_piece_decoder(self._decoder)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of all the ids at once: what `tokenizer.decode` gives, without its detours."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def start(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one sample."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        if self._decoder.get("type") == "ByteLevel":
            return _ByteLevelDetokenizer(self._get_bytes, hidden)
        if self._piece_rules is not None:
            return _PieceDetokenizer(self._get_token, hidden, self._piece_rules)
        return _WindowDetokenizer(partial(self.decode, skip_special_tokens=False), self._get_token, hidden)

    def get_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself; a token may be a part of a character."""
        if self._decoder.get("type") == "ByteLevel":
            return self._get_bytes(token_id)
        if self._piece_rules is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._get_token(token_id)
        byte = _parse_byte(token)  # decoded alone, a token would lose the blank that only a text's first one loses
        return token.replace(self._piece_rules.mark, self._piece_rules.blank).encode() if byte is None else byte

    def _get_token(self, token_id: int) -> str:
        token = self._tokens.get(token_id)
        if token is None:
            token = self._tokens[token_id] = self._backend.id_to_token(token_id) or ""
        return token

    def _get_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of byte-level BPE; a token with a character outside its alphabet stands for itself."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._get_token(token_id)
            try:
                found = bytes([BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:
                found = token.encode()
            self._token_bytes[token_id] = found
        return found


def _make_byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level BPE writes each byte: itself, or one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


BYTE_OF_CHARACTER = _make_byte_alphabet()


class _ByteLevelDetokenizer:
    def __init__(self, get_bytes: Callable[[int], bytes], hidden: frozenset[int]):
        self._get_bytes, self._hidden = get_bytes, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._utf8.decode(self._get_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


@dataclass(frozen=True, slots=True)
class _PieceRules:
    """Of a decoder that replaces a mark by a blank, joins byte tokens, and may strip the first blanks."""

    mark: str
    blank: str
    strip: str
    max_stripped: int


def _match_piece_decoder(decoder: dict[str, Any]) -> _PieceRules | None:
    """The rules of a `Sequence` of Replace, ByteFallback, Fuse and perhaps Strip; None for any other decoder."""
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    if [step["type"] for step in steps] not in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return None
    mark = steps[0]["pattern"].get("String")
    strip: dict[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
    if mark is None or strip["stop"]:
        return None
    return _PieceRules(mark, steps[0]["content"], strip["content"], strip["start"])


class _PieceDetokenizer:
    """A run of byte tokens becomes characters when it is valid UTF-8 as a whole, else one U+FFFD for each byte.

    Characters are given out as they get complete; a fault later in the same run then concerns only what follows it.
    """

    def __init__(self, get_token: Callable[[int], str], hidden: frozenset[int], rules: _PieceRules):
        self._get_token, self._hidden, self._rules = get_token, hidden, rules
        self._num_to_strip = rules.max_stripped
        self._run = b""  # bytes of the current run that are not given out
        self._run_is_broken = False

    def push(self, token_id: int) -> str:
        token = "" if token_id in self._hidden else self._get_token(token_id)
        if not token:
            return ""
        byte = _parse_byte(token)
        if byte is None:
            return self._strip(self._end_run() + token.replace(self._rules.mark, self._rules.blank))
        self._run += byte
        if not self._run_is_broken:
            try:
                text = self._run.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return ""
                self._run_is_broken = True
            else:
                self._run = b""
                return self._strip(text)
        text, self._run = REPLACEMENT * len(self._run), b""
        return self._strip(text)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        rest, self._run, self._run_is_broken = REPLACEMENT * len(self._run), b"", False
        return rest

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != self._rules.strip:
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def _parse_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


class _WindowDetokenizer:
    """Decodes the newest tokens together with those before them, and gives out what the new ones add."""

    def __init__(self, decode: Callable[[list[int]], str], get_token: Callable[[int], str], hidden: frozenset[int]):
        self._decode, self._get_token, self._hidden = decode, get_token, hidden
        self._context: list[int] = []  # tokens whose text was given out last
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        # A token without text would leave the context empty, and some decoders treat the first token specially.
        if token_id in self._hidden or not self._get_token(token_id):
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        return self._give_out(self._decode(self._context + self._held)) if self._held else ""

    def _give_out(self, text: str) -> str:
        known = len(self._decode(self._context)) if self._context else 0
        self._context, self._held = self._held, []
        return text[known:]
