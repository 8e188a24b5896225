"""What config.json and the options tell is refused at once: before a process starts, and as one line."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_folders import write_folder

from minisgl.errors import ModelLoadError
from minisgl.llm import LLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, two KV heads, 128 MLP columns; heads of a size that every backend has."""
    return write_folder(tmp_path_factory.mktemp("model") / "m", head_dim=64)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever starts one fails otherwise than the test expects."""
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")


REFUSED = [
    ({"tp_size": 3}, "4 attention heads do not divide over tp_size 3; use tp_size 1 or 2 or 4"),
    (
        {"device": "cpu", "attention_backend": "torch,fi"},
        "attention_backend fi needs an NVIDIA GPU, the device is cpu; use attention_backend=auto",
    ),
    (
        {"attention_backend": "trtllm", "page_size": 8, "dtype": "bfloat16"},
        "attention_backend trtllm needs page_size 16 or 32 or 64 or 128, got 8; use attention_backend=auto",
    ),
    pytest.param(
        {"attention_backend": "fi", "dtype": "bfloat16"},
        "attention_backend fi needs an NVIDIA GPU and the package flashinfer-python, which is not installed; "
        "install it, or use attention_backend=auto",
        marks=pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed"),
    ),
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


def test_refusal_by_a_worker_is_one_line_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    """What needs torch to know: how many GPUs there are."""
    command = [sys.executable, "-m", "minisgl.engine", "--model", str(folder), "--address", f"ipc://{tmp_path}/e",
               "--device=cuda", "--tp-size=2"]  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    engine = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (engine.returncode, engine.stdout) == (3, "")
    (line,) = engine.stderr.splitlines()
    assert "ERROR ModelLoadError: device cuda has 0 visible NVIDIA GPUs" in line and "tp_size 2 needs one" in line


def test_refusal_by_an_engine_of_ones_own_is_said_by_the_exception_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ModelLoadError, match="device cuda has 0 visible NVIDIA GPUs"):
        LLM(folder, device="cuda")
    assert capfd.readouterr().err == ""
