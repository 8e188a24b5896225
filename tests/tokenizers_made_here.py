"""Small tokenizers of the kinds that real models have, without transformers and without files."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.detokenizer import BYTE_OF_CHARACTER

BOS, EOS = "<|bos|>", "<|eos|>"
WORDS = ("▁", "▁a", "▁the", "b", "cd", "é", "日本", "▁🙂", ".", "▁▁", "▁(", ")", "▁{", "ing")


class FastTokenizer:
    """The part of transformers' fast tokenizers that the frontend uses."""

    bos_token = BOS
    chat_template = None
    name_or_path = "made here"

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend
        self.eos_token_id = backend.token_to_id(EOS)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def __call__(self, texts: list[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}


def make_byte_tokenizer() -> FastTokenizer:
    """Byte-level BPE without merges: token id = byte; 256 and 257 are BOS and EOS, 258 is an added word."""
    backend = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    backend.add_tokens([AddedToken("日 ü", special=False)])
    return FastTokenizer(backend)


def make_piece_tokenizer(num_bytes: int = 256) -> FastTokenizer:
    """Word pieces with a mark at word starts: byte tokens, then `WORDS`, then BOS (put before every text) and EOS."""
    pieces = [f"<0x{byte:02X}>" for byte in range(num_bytes)] + list(WORDS)
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    bos_id = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    return FastTokenizer(backend)


def make_metaspace_tokenizer() -> FastTokenizer:
    """Word pieces with a decoder that the frontend does not know."""
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(WORDS)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return FastTokenizer(backend)
