"""From random token ids to text, with tokenizers that have merges: whatever the cuts, it is one-shot decoding."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers_made_here import BOS, EOS, WORDS, FastTokenizer

from minisgl.completion import Completion, Delta, complete
from minisgl.core import FinishReason, SamplingParams
from minisgl.detokenizer import TextDecoder
from minisgl.mailbox import Output

CORPUS = [
    "The cat sat on the mat; it was “très” été.",
    "日本語のテキスト、日本の本。",
    "naïve 🙂🙂 ñandú €5",
    "a\n\n  b\tc",
] * 3
SPECIAL = [AddedToken(BOS, special=True), AddedToken(EOS, special=True)]


def make_trained_byte_tokenizer() -> FastTokenizer:
    """Byte-level BPE whose merges end within characters as well as across them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return FastTokenizer(backend)


def make_unigram_tokenizer(*, strips_first_blank: bool) -> FastTokenizer:
    """As SentencePiece's unigram models are converted: unknown, special and byte tokens, then pieces with scores."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "▁cat", "ïv", "été", "\n", "▁—"]
    vocab = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_first_blank else steps)
    backend.add_special_tokens(SPECIAL)
    return FastTokenizer(backend)


BYTE_LEVEL = make_trained_byte_tokenizer()
UNIGRAM, UNIGRAM_UNSTRIPPED = (make_unigram_tokenizer(strips_first_blank=strips) for strips in (True, False))
TOKENIZERS = {"byte level": BYTE_LEVEL, "unigram": UNIGRAM, "unigram, unstripped": UNIGRAM_UNSTRIPPED}


def random_ids(tokenizer: FastTokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, also unknown ones. A run of byte tokens is a text or broken from its first byte on: where it turns
    broken only later, the characters before it are out already (`_PieceDetokenizer`)."""
    num_ids = tokenizer.backend_tokenizer.get_vocab_size()
    if tokenizer is BYTE_LEVEL:
        return st.lists(st.integers(0, num_ids + 3), max_size=40)
    texts = st.text(min_size=1, max_size=4).map(lambda text: [1 + byte for byte in text.encode()])
    broken = st.tuples(st.integers(0x80, 0xBF), st.binary(max_size=4)).map(lambda b: [1 + b[0], *(1 + x for x in b[1])])
    # A piece after each run keeps it apart from the next.
    runs = st.tuples(texts | broken, st.integers(257, num_ids - 3)).map(lambda pair: [*pair[0], pair[1]])
    others = st.sampled_from([0, *range(257, num_ids + 3)]).map(lambda token_id: [token_id])
    return st.lists(others | runs, max_size=25).map(lambda parts: [token_id for part in parts for token_id in part])


def stream(tokenizer: FastTokenizer, token_ids: list[int], params: SamplingParams, cuts: list[int]) -> list[Delta]:
    """The deltas of one sample whose outputs end at `cuts`, until its stop string; the last one ends the sample."""
    completion = Completion(params, TextDecoder(tokenizer))
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(token_ids)), len(token_ids)]
    deltas = []
    for i in range(1, len(bounds)):
        reason = FinishReason.LENGTH if i == len(bounds) - 1 else None
        deltas.append(completion.add(Output(1, token_ids[bounds[i - 1] : bounds[i]], reason)))
    return deltas


CUTS = st.lists(st.integers(0, 60), max_size=12)


@pytest.mark.parametrize("skip", [True, False], ids=["hidden", "shown"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_joined_deltas_are_the_ids_decoded_at_once(tokenizer: FastTokenizer, skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)

    @settings(max_examples=200, deadline=None)
    @given(random_ids(tokenizer), CUTS)
    def check(token_ids: list[int], cuts: list[int]) -> None:
        deltas = stream(tokenizer, token_ids, params, cuts)
        text = "".join(delta.text for delta in deltas)
        assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert text == complete(Output(1, token_ids, FinishReason.LENGTH), params, TextDecoder(tokenizer)).text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids

    check()


def cut_by_hand(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first (the longest of several that end there), and that string."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            string = max(found, key=len)
            return text[: end - len(string)], string
    return text, None


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_stop_strings_are_cut_at_the_same_place_whatever_the_tokens_and_outputs(tokenizer: FastTokenizer) -> None:
    """Stop strings are parts of the text itself, so they begin and end within tokens and within characters' tokens."""
    num_found = 0

    @settings(max_examples=300, deadline=None)
    @given(random_ids(tokenizer), CUTS, st.data())
    def check(token_ids: list[int], cuts: list[int], data: st.DataObject) -> None:
        nonlocal num_found
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        strings = ["never seen"]
        for _ in range(data.draw(st.integers(0, 2)) if whole else 0):
            start = data.draw(st.integers(0, len(whole) - 1))
            strings.append(whole[start : start + data.draw(st.integers(1, 6))])
        expected, string = cut_by_hand(whole, strings)
        num_found += string is not None
        deltas = stream(tokenizer, token_ids, SamplingParams(stop=strings), cuts)
        assert "".join(delta.text for delta in deltas) == expected
        assert deltas[-1].stop_reason == string
        assert deltas[-1].finish_reason == ("length" if string is None else "stop")
        given_out = [token_id for delta in deltas for token_id in delta.token_ids]
        assert given_out == token_ids[: len(given_out)]
        assert (
            tokenizer.decode(given_out, skip_special_tokens=True).rstrip("\ufffd").startswith(expected.rstrip("\ufffd"))
        )

    check()
    assert num_found > 30
