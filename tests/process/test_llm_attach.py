"""Attaching to an engine, and starting one: what is refused, and by what name."""

import os
import subprocess
import sys
import time

import pytest
from fake_engine import text_params
from model_folders import write_folder
from tokenizers_made_here import make_byte_tokenizer

from minisgl import __version__
from minisgl.errors import (
    EngineUnreachable,
    InvalidRequest,
    ModelLoadError,
    ProtocolMismatch,
)
from minisgl.llm import LLM
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Refused,
)


@pytest.mark.parametrize(
    "kind, options, match",
    [
        (TypeError, {"page_sise": 16}, "page_sise.*page_size"),
        (TypeError, {"max_num_seq": 16}, "max_num_seq.*max_num_seqs"),
        (ValueError, {"page_size": 0}, "page_size.*0"),
        (ValueError, {"dtype": "int8"}, "dtype.*int8"),
    ],
)
def test_bad_option_is_named_before_anything_else(kind, options, match):
    with pytest.raises(kind, match=match):
        LLM("nowhere", **options)


def test_options_beside_an_address_are_refused():
    for options in ({"page_size": 16}, {"dtype": "float32"}, {"max_num_seqs": 4}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}.*engine="):
            LLM(engine="ipc:///nowhere", **options)
    with pytest.raises(TypeError, match=r"page_sise.*page_size"):
        LLM(engine="ipc:///nowhere", page_sise=16)
    with pytest.raises(TypeError, match="model_path"):
        LLM()


@pytest.mark.parametrize("options", [{}, {"engine": "ipc:///nowhere"}])
def test_empty_model_path_is_refused_by_its_name(options):
    with pytest.raises(ValueError, match="model must be a folder, a file or a name, got ''"):
        LLM("", **options)


def test_missing_model_is_named_at_once(tmp_path):
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match="no_such_model"):
        LLM(str(tmp_path / "no_such_model"))
    assert time.monotonic() - started < 1


def test_attach_to_nobody_is_unreachable_within_the_bound(tmp_path):
    started = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"engine\.sock"):
        LLM(engine=f"ipc://{tmp_path}/engine.sock")
    assert 4 < time.monotonic() - started < 8


@pytest.mark.parametrize("address", ["engine.sock", "tcp://*:80", "tcp://127.0.0.1", "http://localhost"])
def test_attach_to_a_bad_address_is_a_value_error(address):
    with pytest.raises(ValueError, match="address"):
        LLM(engine=address)


def test_attach_to_another_version_names_both(engine):
    engine.refuse = Refused(PROTOCOL_VERSION + 1, "9.9.9", "no")
    with pytest.raises(ProtocolMismatch) as caught:
        LLM(engine=engine.address)
    for part in (str(PROTOCOL_VERSION + 1), "9.9.9", str(PROTOCOL_VERSION), __version__):
        assert part in str(caught.value)


def test_attach_refused_by_the_same_version_says_why(engine):
    engine.refuse = Refused(PROTOCOL_VERSION, __version__, "too many clients")
    with pytest.raises(EngineUnreachable, match="too many clients"):
        LLM(engine=engine.address)


def test_attach_with_another_model_is_refused(engine, tmp_path):
    other = write_folder(tmp_path / "other", vocab_size=1000)
    with pytest.raises(ModelLoadError, match=r"1000.*320"):
        LLM(str(other), engine=engine.address)


def test_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    small = write_folder(tmp_path / "small", make_byte_tokenizer(), vocab_size=258, eos_token_id=257)
    with pytest.raises(ModelLoadError, match="258"):
        LLM(str(small))


def test_folder_without_a_tokenizer_serves_ids(engine, tmp_path):
    with LLM(str(write_folder(tmp_path / "ids")), engine=engine.address) as llm:
        result = llm.generate([[1]], text_params())[0]
        assert (result["text"], result["token_ids"]) == ("", [2, 3, 4])
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate("a")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(ModelLoadError, match="no tokenizer"):
            _ = llm.tokenizer


def test_broken_tokenizer_is_named(engine, tmp_path):
    broken = write_folder(tmp_path / "broken", make_byte_tokenizer())
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="broken"):
        LLM(str(broken), engine=engine.address)


def test_hub_id_is_found_in_the_local_cache_offline(tmp_path):
    revision = "0" * 40
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = write_folder(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    code = "from minisgl.model_folder import resolve_model; print(resolve_model('someone/tiny').path)"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, str(snapshot)), done.stderr
