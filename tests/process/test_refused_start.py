"""What config.json and the options tell is refused at once: before a process starts, and as one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from model_folders import write_folder

from minisgl.errors import ModelLoadError
from minisgl.llm import LLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two KV heads, 128 MLP columns."""
    return write_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts one fails otherwise than the test expects."""
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")


REFUSED = [
    ({"tp_size": 3}, "4 attention heads do not divide over tp_size 3; use tp_size 1 or 2 or 4"),
]


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_llm_refuses_before_it_starts_a_process(folder: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        LLM(folder, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_engine_refuses_in_one_line_and_starts_no_worker(
    folder: Path, tmp_path: Path, options: dict[str, object], text: str
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "minisgl.engine", "--model", str(folder), "--address", f"ipc://{tmp_path}/e",
               "--worker-module", "tests.process.fake_worker", *flags]  # fmt: skip
    engine = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (engine.returncode, engine.stdout) == (3, "")
    assert engine.stderr == f"minisgl engine: ERROR ModelLoadError: {text}\n"
