"""A scripted engine and an `LLM` attached to it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, running_engine
from model_folders import write_folder
from tokenizers_made_here import make_byte_tokenizer

from minisgl.llm import LLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "bytes", make_byte_tokenizer())


@pytest.fixture
def engine(tmp_path: Path, folder: Path) -> Iterator[FakeEngine]:
    with running_engine(f"ipc://{tmp_path}/engine.sock", model=str(folder)) as engine:
        yield engine
    left = [thread.name for thread in threading.enumerate() if thread.name == "minisgl-client"]
    assert not left, "a connection was left open"


@pytest.fixture
def llm(engine: FakeEngine) -> Iterator[LLM]:
    with LLM(engine=engine.address) as llm:
        yield llm
