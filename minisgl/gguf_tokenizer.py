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

CONTROL_TOKEN, USER_TOKEN = 3, 4  # of tokenizer.ggml.token_type

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the pattern that cuts text before merging; None is GPT-2's own.
PATTERNS: Mapping[str, str | None] = MappingProxyType(
    {
        "default": None,
        "gpt-2": None,
        "smollm": None,  # and every digit by itself
        "qwen2": _QWEN2,
        "llama-bpe": _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    }
)


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file.

    Raises:
        ModelLoadError: the file has none, or one of another kind than byte-level BPE with a known pre-tokenizer.
    """
    # Deferred: the import takes most of a second.
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    header = GgufHeader(path)
    metadata = header.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    tokens = header.get_strings("tokenizer.ggml.tokens")
    if kind != "gpt2" or pre not in PATTERNS or not tokens:
        raise ModelLoadError(
            f"{path}: tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported; supported is 'gpt2' with "
            f"{', '.join(PATTERNS)}; or use a folder with a tokenizer.json"
        )
    merges = [merge.partition(" ")[::2] for merge in header.get_strings("tokenizer.ggml.merges")]
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"{path}: tokenizer.ggml: {error}") from None
    tokenizer.pre_tokenizer = _make_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, tokens, header.get_numbers("tokenizer.ggml.token_type"))
    names = _read_special_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token") and (bos := names.get("bos_token")):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    fast.name_or_path = str(path)
    return fast


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
