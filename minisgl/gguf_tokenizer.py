"""Builds the tokenizer of a GGUF file from the file's own metadata.

transformers can do this too, but goes through the `gguf` package and torch, which takes ten seconds, and does not tell
the pre-tokenizers of one model from another's.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufHeader

NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_TOKEN = 1, 2, 3, 4  # of tokenizer.ggml.token_type
WORD_START = "▁"  # of SentencePiece

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the pattern that cuts text before merging; None is GPT-2's own.
PATTERNS: Mapping[str, str | None] = MappingProxyType(
    {
        "default": None,
        "gpt-2": None,
        "smollm": None,  # and every digit by itself
        "qwen2": _QWEN2,
        "llama-bpe": _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
        "tekken": _TEKKEN,
    }
)

WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word that is a token is not merged up to


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file.

    Raises:
        ModelLoadError: the file has none, or one that is neither SentencePiece's nor byte-level BPE with a known
            pre-tokenizer.
    """
    # Deferred: the import takes most of a second.
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    header = GgufHeader(path)
    metadata = header.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    tokens = header.get_strings("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in PATTERNS) or not tokens:
        raise ModelLoadError(
            f"{path}: tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported; supported are 'llama', and "
            f"'gpt2' with {', '.join(PATTERNS)}; or use a folder with a tokenizer.json"
        )
    try:
        tokenizer = _make_piece_tokenizer(header, tokens) if kind == "llama" else _make_byte_tokenizer(header, tokens)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{path}: tokenizer.ggml: {error}") from None
    _add_tokens(tokenizer, tokens, header.get_numbers("tokenizer.ggml.token_type"))
    names = _read_special_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and (bos := names.get("bos_token")):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    fast.name_or_path = str(path)
    return fast


def _make_byte_tokenizer(header: GgufHeader, tokens: list[str]) -> Any:
    """Byte-level BPE (`gpt2`)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    merges = [merge.partition(" ")[::2] for merge in header.get_strings("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _make_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _make_piece_tokenizer(header: GgufHeader, tokens: list[str]) -> Any:
    """SentencePiece's BPE (`llama`): the pair whose union has the best score is merged first; bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.get_numbers("tokenizer.ggml.scores")
    kinds = header.get_numbers("tokenizer.ggml.token_type")
    if not len(scores) == len(kinds) == len(tokens):
        raise ValueError(f"{len(tokens)} tokens, but {len(scores)} scores and {len(kinds)} token types")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _list_merges(vocab, scores, kinds)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN_TOKEN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", WORD_START)
    prefix = [normalizers.Prepend(WORD_START)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _list_merges(
    vocab: Mapping[str, int], scores: list[int | float], kinds: list[int | float]
) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, the piece of the best score first."""
    found = []
    for piece, i in vocab.items():
        if kinds[i] != NORMAL_TOKEN:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], i, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _make_pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    pattern = PATTERNS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, byte_level])
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _add_tokens(tokenizer: Any, tokens: list[str], kinds: list[int | float]) -> None:
    from tokenizers import AddedToken

    found = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL_TOKEN, USER_TOKEN)]
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False) for token, kind in found])


def _read_special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """bos_token, eos_token and so on, by name."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token_id) is int and 0 <= token_id < len(tokens):
            names[name] = tokens[token_id]
    return names
