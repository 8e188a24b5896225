"""Tokenizers of real kinds, loaded by transformers: nothing from the folder runs, and text and ids agree."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from model_folders import ARRAY, STRING, UINT32, write_folder, write_gguf, write_json
from tokenizers_made_here import BOS, EOS, make_byte_tokenizer, make_piece_tokenizer

from minisgl.detokenizer import BYTE_OF_CHARACTER
from minisgl.errors import InvalidRequest, ModelLoadError
from minisgl.model_folder import resolve_model
from minisgl.tokenizer import PromptEncoder, load_tokenizer


def load(path: Path) -> PromptEncoder:
    model = resolve_model(str(path))
    return PromptEncoder(load_tokenizer(model), model.config.vocab_size)


EVIL = "from pathlib import Path\nPath({marker!r}).touch()\n"


def test_template_comes_from_the_folder_alone(tmp_path):
    """Options are variables of the folder's template, and nothing that changes what is run or how."""
    folder = write_folder(tmp_path / "model", make_byte_tokenizer())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }}{{ mark }}"
    write_json(folder / "tokenizer_config.json", config)
    encoder = load(folder)
    message = [{"role": "user", "content": "a"}]
    assert encoder.encode_chat(message, {"mark": "b"}) == [97, 98]
    for name in ("chat_template", "continue_final_message", "tokenize", "return_dict", "tools"):
        with pytest.raises(InvalidRequest, match=f"{name} is no variable of a chat template"):
            encoder.encode_chat(message, {name: "x"})
    for options in ({"mark": "\ud800"}, {}):
        with pytest.raises(InvalidRequest, match="the conversation is not valid text"):
            encoder.encode_chat([{"role": "user", "content": "a" if options else "\ud800"}], options)


def test_code_in_the_folder_never_runs(tmp_path):
    """Both files name code of the folder, as checkpoints with their own classes do."""
    marker = tmp_path / "marker"
    folder = write_folder(tmp_path / "model", make_byte_tokenizer(), auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    write_json(folder / "tokenizer_config.json", {**config, "auto_map": auto_map})
    assert load(folder).encode(["ab"]) == [[97, 98]]
    (folder / "tokenizer.json").rename(folder / "vocab.json")  # now only code could make a tokenizer of it
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer"):
        load(folder)
    assert not marker.exists()


def test_tokenizer_json_is_used_as_it_is(tmp_path):
    """The class that tokenizer_config.json names would rebuild it from its vocabulary, with other rules."""
    folder = write_folder(tmp_path / "model", make_piece_tokenizer())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "tokenizer_class": "LlamaTokenizer"})
    encoder = load(folder)
    expected = make_piece_tokenizer().backend_tokenizer.encode("ab the").ids
    assert encoder.encode(["ab the", f"{BOS}ab the"]) == [expected, expected]
    assert encoder.tokenizer.encode("ab the") == expected


def test_blanks_truncation_and_padding_of_the_file_have_no_effect(tmp_path):
    made = make_byte_tokenizer()
    made.backend_tokenizer.enable_truncation(2)
    made.backend_tokenizer.enable_padding(length=8)
    folder = write_folder(tmp_path / "model", made)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(
        folder / "tokenizer_config.json", {**config, "clean_up_tokenization_spaces": True, "model_max_length": 3}
    )
    encoder = load(folder)
    backend = encoder.tokenizer.backend_tokenizer
    assert backend.truncation is None and backend.padding is None  # or else threads would change them in turn
    ids = encoder.encode(["Hi , there ."])[0]
    assert bytes(ids) == b"Hi , there ."
    assert encoder.tokenizer.decode(ids) == encoder.decoder.decode(ids, skip_special_tokens=True) == "Hi , there ."


@pytest.mark.parametrize(
    "make", [make_byte_tokenizer, lambda: make_piece_tokenizer(num_bytes=128)], ids=["bytes", "pieces"]
)
def test_streamed_text_is_what_the_tokenizer_decodes(tmp_path, make):
    encoder = load(write_folder(tmp_path / "model", make()))
    chance = random.Random(0)
    for skip in (True, False):
        for _ in range(50):
            ids = [chance.randrange(320) for _ in range(chance.randrange(40))]
            detokenizer = encoder.decoder.start(skip_special_tokens=skip)
            streamed = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
            whole = encoder.tokenizer.decode(ids, skip_special_tokens=skip)
            assert streamed == whole == encoder.decoder.decode(ids, skip_special_tokens=skip)


def test_end_id_is_the_tokenizers(tmp_path):
    assert load(write_folder(tmp_path / "model", make_byte_tokenizer())).end_id == 257


def test_loading_spares_torch(tmp_path):
    """Half of the start-up time of a program would go into it. Older releases of transformers import it themselves."""
    code = (
        "import sys; from pathlib import Path; from minisgl.model_folder import resolve_model;"
        "from minisgl.tokenizer import PromptEncoder, load_tokenizer;"
        "before = 'torch' in sys.modules;"
        "from transformers import PreTrainedTokenizerFast; by_itself = 'torch' in sys.modules;"
        "encoder = PromptEncoder(load_tokenizer(resolve_model(sys.argv[1])), 320);"
        "encoder.encode_chat([{'role': 'user', 'content': 'x'}]);"
        "sys.exit('torch' in sys.modules and not by_itself or before)"
    )
    folder = write_folder(tmp_path / "model", make_byte_tokenizer())
    assert subprocess.run([sys.executable, "-c", code, str(folder)], timeout=60).returncode == 0


TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_chat_template_is_found_in_every_place(tmp_path, place):
    folder = write_folder(tmp_path / "model", make_byte_tokenizer())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    write_json(folder / "tokenizer_config.json", config)
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(folder).encode_chat([{"role": "user", "content": "hi"}])
    if place == "tokenizer_config.json":
        write_json(folder / place, {**config, "chat_template": TEMPLATE})
    elif place == "chat_template.json":
        write_json(folder / place, {"chat_template": 5})
        with pytest.raises(ModelLoadError, match=r"chat_template\.json: chat_template is 5"):
            load(folder)
        write_json(folder / place, {"chat_template": TEMPLATE})
    else:
        (folder / place).write_text(TEMPLATE)
    assert bytes(load(folder).encode_chat([{"role": "user", "content": "hi"}])) == b"[hi]"


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_chat_template_runs_in_the_sandbox(tmp_path, template):
    folder = write_folder(tmp_path / "model", make_byte_tokenizer())
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest, match="SecurityError"):
        load(folder).encode_chat([{"role": "user", "content": "hi"}])


def test_model_without_any_end_id_is_warned_of(tmp_path, caplog):
    made = make_byte_tokenizer()
    assert load(write_folder(tmp_path / "one", made, eos_token_id=None)).end_id == 257 and not caplog.text
    folder = write_folder(tmp_path / "none", made, eos_token_id=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "eos_token": None})
    load(folder)
    assert "names an end-of-sequence id" in caplog.text


def test_folder_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(resolve_model(str(write_folder(tmp_path)))) is None


# --------------------------------------------------------------------------------------------------------------------
# GGUF

NORMAL, CONTROL, BYTE = 1, 3, 6
MERGES = ["1 2", "a b", "ab c", "Ġ a"]


def write_gguf_tokenizer(path: Path, pre: str = "smollm", **changes) -> Path:
    """Byte tokens 0..255 in the order of their bytes, then the merged tokens, then BOS and EOS."""
    tokens = [*BYTE_OF_CHARACTER, *(merge.replace(" ", "") for merge in MERGES), BOS, EOS]
    return write_gguf(
        path,
        **{
            "tokenizer__ggml__model": (STRING, "gpt2"),
            "tokenizer__ggml__pre": (STRING, pre),
            "tokenizer__ggml__tokens": (ARRAY, tokens),
            "tokenizer__ggml__token_type": (ARRAY, [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2),
            "tokenizer__ggml__merges": (ARRAY, MERGES),
            "tokenizer__ggml__bos_token_id": (UINT32, len(tokens) - 2),
            "tokenizer__ggml__eos_token_id": (UINT32, len(tokens) - 1),
            "tokenizer__chat_template": (STRING, "{{ messages[0]['content'] }}{{ eos_token }}"),
            **changes,
        },
    )


def test_threads_that_load_the_first_tokenizers_at_once_all_get_one(tmp_path):
    """In a program of its own, as transformers is imported once in each."""
    code = (
        "import sys, threading; from concurrent.futures import ThreadPoolExecutor;"
        "from minisgl.model_folder import resolve_model; from minisgl.tokenizer import load_tokenizer;"
        "model = resolve_model(sys.argv[1]); start = threading.Barrier(4);"
        "load = lambda i: (start.wait(), load_tokenizer(model))[1];"
        "found = list(ThreadPoolExecutor(4).map(load, range(4))); assert None not in found"
    )
    path = write_gguf_tokenizer(tmp_path / "model.gguf")
    run = subprocess.run([sys.executable, "-c", code, str(path)], timeout=90, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_gguf_tokenizer_encodes_and_decodes(tmp_path):
    encoder = load(write_gguf_tokenizer(tmp_path / "m.gguf"))
    ids = encoder.encode(["abc ab é", f"x{EOS}y"])
    assert ids[0] == [258, 32, 257, 32, *"é".encode()]
    assert ids[1] == [120, 261, 121]
    assert encoder.tokenizer.decode(ids[0]) == "abc ab é"
    assert encoder.tokenizer.decode(ids[1], skip_special_tokens=True) == "xy"
    assert encoder.encode_chat([{"role": "user", "content": "ab"}]) == [257, 261]


@pytest.mark.parametrize(
    "pre, expected",
    [("smollm", [49, 50]), ("gpt-2", [256]), ("qwen2", [49, 50]), ("llama-bpe", [256]), ("tekken", [49, 50])],
)
def test_gguf_pre_tokenizer_is_the_models(tmp_path, pre, expected):
    assert load(write_gguf_tokenizer(tmp_path / "m.gguf", pre)).encode(["12"]) == [expected]


def test_gguf_tokenizer_puts_bos_first_where_the_file_says_so(tmp_path):
    encoder = load(write_gguf_tokenizer(tmp_path / "m.gguf", tokenizer__ggml__add_bos_token=(UINT32, 1)))
    assert encoder.encode(["x", f"{BOS}x"]) == [[260, 120], [260, 120]]


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"tokenizer__ggml__model": (STRING, "llama")}, "0 scores"),
        ({"tokenizer__ggml__model": (STRING, "t5")}, "'t5'"),
        ({"tokenizer__ggml__pre": (STRING, "viking")}, "'viking'"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer model"),
        ({"tokenizer__ggml__merges": (ARRAY, ["a zzz"])}, "tokenizer.ggml"),
    ],
)
def test_gguf_tokenizer_that_is_not_known_is_refused(tmp_path, changes, part):
    with pytest.raises(ModelLoadError) as caught:
        load(write_gguf_tokenizer(tmp_path / "m.gguf", **changes))
    assert part in str(caught.value) and "m.gguf" in str(caught.value)


def test_gguf_tokenizer_without_a_template_refuses_chat_only(tmp_path):
    encoder = load(write_gguf_tokenizer(tmp_path / "m.gguf", tokenizer__chat_template=None))
    assert encoder.encode(["a"]) == [[97]]
    with pytest.raises(InvalidRequest, match="no chat template"):
        encoder.encode_chat([{"role": "user", "content": "x"}])


def write_gguf_pieces(path: Path, **changes) -> Path:
    """The pieces of `make_piece_tokenizer` as SentencePiece would have them: later merges have worse scores."""
    vocab = sorted(make_piece_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    kinds = [CONTROL if t in (BOS, EOS) else BYTE if t.startswith("<0x") else NORMAL for t in tokens]
    return write_gguf(
        path,
        **{
            "tokenizer__ggml__model": (STRING, "llama"),
            "tokenizer__ggml__tokens": (ARRAY, tokens),
            "tokenizer__ggml__scores": (ARRAY, [-i for i in range(len(tokens))]),
            "tokenizer__ggml__token_type": (ARRAY, kinds),
            "tokenizer__ggml__bos_token_id": (UINT32, tokens.index(BOS)),
            "tokenizer__ggml__eos_token_id": (UINT32, tokens.index(EOS)),
            **changes,
        },
    )


def test_gguf_pieces_encode_and_decode(tmp_path):
    encoder = load(write_gguf_pieces(tmp_path / "m.gguf"))
    tokenizer, bos = encoder.tokenizer, encoder.tokenizer.bos_token_id
    for text in ("ab the", "the  ab", "é", "a\nb", f"x{EOS} y"):
        (ids,) = encoder.encode([text.replace(f"{EOS} ", EOS)])  # a mark is put after special tokens, too
        assert ids[0] == bos and bos not in ids[1:]
        assert tokenizer.decode(ids[1:]) == text
    assert encoder.encode([f"{BOS}a"])[0].count(bos) == 1
    plain = load(write_gguf_pieces(tmp_path / "p.gguf", tokenizer__ggml__add_space_prefix=(UINT32, 0),
                                   tokenizer__ggml__add_bos_token=(UINT32, 0)))  # fmt: skip
    assert plain.tokenizer.convert_ids_to_tokens(plain.encode(["ab"])[0])[0] != BOS
    assert plain.tokenizer.decode(plain.encode([" ab"])[0]) == " ab"


def test_gguf_pieces_merge_the_best_score_first(tmp_path):
    """Of `b c` and `a b` in abc, the one whose union scores better, whatever their order in the file."""
    tokens = ["<unk>", "a", "b", "c", "ab", "bc", *(f"<0x{i:02X}>" for i in range(256))]
    for scores, expected in (((-2, -1), [1, 5]), ((-1, -2), [4, 3])):
        path = write_gguf_pieces(
            tmp_path / f"{expected}.gguf",
            tokenizer__ggml__tokens=(ARRAY, tokens),
            tokenizer__ggml__scores=(ARRAY, [0, -9, -9, -9, *scores, *[0] * 256]),
            tokenizer__ggml__token_type=(ARRAY, [2, *[NORMAL] * 5, *[BYTE] * 256]),
            tokenizer__ggml__add_space_prefix=(UINT32, 0),
            tokenizer__ggml__bos_token_id=None,
            tokenizer__ggml__eos_token_id=None,
        )
        encoder = load(path)
        assert encoder.encode(["abc"]) == [expected]
        assert encoder.encode(["é"]) == [[6 + 0xC3, 6 + 0xA9]]
        assert encoder.tokenizer.decode([6 + 0xC3, 6 + 0xA9]) == "é"
