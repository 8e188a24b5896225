"""Joined, what a detokenizer gives out is what the tokenizer makes of all the ids at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made_here import (
    BOS,
    WORDS,
    FastTokenizer,
    make_byte_tokenizer,
    make_metaspace_tokenizer,
    make_piece_tokenizer,
)

from minisgl.detokenizer import REPLACEMENT, TextDecoder

BYTES, PIECES, METASPACE = make_byte_tokenizer(), make_piece_tokenizer(), make_metaspace_tokenizer()
ASCII_PIECES = make_piece_tokenizer(num_bytes=128)
NUM_BYTES = 256


def stream(tokenizer: FastTokenizer, token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = TextDecoder(tokenizer).start(skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_get_bytes_of_a_part_of_a_character_are_its_own(tokenizer):
    decoder = TextDecoder(tokenizer)
    for text in ("a", "é", "日本", "🙂"):
        ids = bytes_tokens(text)
        assert b"".join(decoder.get_bytes(token_id) for token_id in ids) == text.encode()
        assert all(len(decoder.get_bytes(token_id)) == 1 for token_id in ids)


def test_get_bytes_of_words_keep_the_blanks_before_them():
    ids = [NUM_BYTES + WORDS.index(word) for word in ("▁a", "▁the", "ing", "▁(")]
    decoder = TextDecoder(PIECES)
    assert b"".join(map(decoder.get_bytes, ids)).decode() == " " + PIECES.decode(ids) == " a theing ("


def test_get_bytes_of_whole_words_are_their_text():
    assert TextDecoder(PIECES).get_bytes(NUM_BYTES + WORDS.index("日本")) == "日本".encode()
    assert TextDecoder(METASPACE).get_bytes(0) == METASPACE.decode([0]).encode()
    assert TextDecoder(BYTES).get_bytes(NUM_BYTES) == BOS.encode()


def ids_of(tokenizer: FastTokenizer) -> st.SearchStrategy[list[int]]:
    # A few ids past the end: models have rows that the tokenizer does not know.
    return st.lists(st.integers(0, tokenizer.backend_tokenizer.get_vocab_size() + 3), max_size=60)


def bytes_tokens(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTES, ASCII_PIECES, METASPACE], ids=["bytes", "pieces", "metaspace"])
def test_push_random_ids_joins_to_decode(tokenizer, skip):
    @settings(max_examples=300, deadline=None)
    @given(ids_of(tokenizer))
    def check(token_ids):
        assert "".join(stream(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)

    check()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.integers(0, 2**32))
def test_push_of_valid_byte_runs_joins_to_decode(text, seed):
    """Characters by their bytes and words by their pieces, in any order: what a model writes."""
    chance = random.Random(seed)
    token_ids = []
    for character in text:
        token_ids += bytes_tokens(character)
        if chance.random() < 0.5:
            token_ids.append(NUM_BYTES + chance.randrange(len(WORDS)))
    assert "".join(stream(PIECES, token_ids)) == PIECES.decode(token_ids)


@pytest.mark.parametrize("broken", [[0xFF], [0xE3], [0xE3, 0x81], [0x80, 0xFF, 0x80], [0xE3, 0x41, 0xE3]])
def test_push_of_a_broken_byte_run_gives_one_mark_for_each_byte(broken):
    token_ids = [NUM_BYTES + 1, *broken, NUM_BYTES + 3, *broken]
    assert "".join(stream(PIECES, token_ids)) == PIECES.decode(token_ids)


def test_push_of_a_broken_byte_run_does_not_wait_for_its_end():
    deltas = stream(PIECES, [NUM_BYTES + 1, 0xFF, 0xFF, 0x41, 0xE3])
    assert deltas == ["a", REPLACEMENT, REPLACEMENT, REPLACEMENT, REPLACEMENT, ""]


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_push_never_gives_half_a_character(tokenizer):
    text = "aé日🙂"
    deltas = stream(tokenizer, bytes_tokens(text))
    assert [delta for delta in deltas if delta] == list(text)


def test_push_of_text_that_does_not_end_gives_it_out_at_the_end():
    deltas = stream(BYTES, [*b"ab", 0xF0, 0x9F])
    assert deltas == ["a", "b", "", "", REPLACEMENT]


def test_push_of_a_broken_byte_gives_it_out_with_the_next_token():
    assert stream(BYTES, [0xE3, *b"ab"]) == ["", REPLACEMENT + "a", "b", ""]


def test_push_of_a_special_token_is_hidden_or_shown():
    bos = BYTES.backend_tokenizer.token_to_id(BOS)
    assert "".join(stream(BYTES, [97, bos, 98])) == "ab"
    assert "".join(stream(BYTES, [97, bos, 98], skip=False)) == f"a{BOS}b"


def test_push_of_an_added_word_with_characters_outside_the_alphabet_gives_the_word():
    word = BYTES.backend_tokenizer.token_to_id("日 ü")
    assert "".join(stream(BYTES, [97, word, 98])) == "a日 üb"


def test_first_blank_is_stripped_once():
    blank, word = NUM_BYTES + WORDS.index("▁"), NUM_BYTES + WORDS.index("▁a")
    assert stream(PIECES, [blank, word, word])[:3] == ["", " a", " a"]
    assert stream(PIECES, [word, blank, word])[:3] == ["a", " ", " a"]


def test_window_of_broken_text_does_not_grow():
    """A decoder that is asked again gets no more tokens than needed, however long nothing is valid."""
    asked = []

    class Counting(FastTokenizer):
        def __init__(self, backend):
            super().__init__(backend)
            self.backend_tokenizer = self

        decoder = METASPACE.backend_tokenizer.decoder

        def get_added_tokens_decoder(self):
            return {}

        def id_to_token(self, token_id):
            return REPLACEMENT

        def decode(self, token_ids, skip_special_tokens=False):
            asked.append(len(token_ids))
            return REPLACEMENT * len(token_ids)

    tokenizer = Counting(METASPACE.backend_tokenizer)
    assert "".join(stream(tokenizer, [1] * 200)) == REPLACEMENT * 200
    assert max(asked) <= 16
