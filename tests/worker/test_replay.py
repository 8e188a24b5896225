"""A recorded `steps` channel, run again without an engine."""

import dataclasses
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.protocol import PROTOCOL_VERSION, Configure, Control, ControlAction, Message, Step, Stop, encode
from minisgl_worker.model_runner import ModelRunner
from minisgl_worker.replay import make_replay_config, read_recording, replay
from tests.worker.checkpoints import GREEDY, make_admit, make_step, write_checkpoint

DRAWN = dataclasses.replace(GREEDY, temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("replay") / "m")


def make_config(folder: Path, **options: object) -> EngineConfig:
    values = {"device": "cpu", "dtype": "float32", "num_pages": 16, "page_size": 4, "max_running_req": 2, **options}
    return EngineConfig.from_options(folder, values)


def make_steps() -> list[Step]:
    admits = (make_admit(0, [4, 8, 15, 16], [3, 4]), make_admit(1, [23, 42], [9], sampling=DRAWN, seed=2**64 - 1))
    return [
        make_step(0, admits=admits, prefills=(0, 0, 4, 1, 1, 0, 1, 0)),
        make_step(1, decode=[0], run_decode=True, prefills=(1, 1, 1, 1)),
        make_step(2, decode=[0, 1], run_decode=True),
        make_step(3, run_decode=True, grants=(1, 1, 12)),
        make_step(4, run_decode=True),
    ]


def write_recording(file: Path, messages: list[Message], num_cut_bytes: int = 0) -> str:
    data = b"".join(struct.pack("<I", len(encode(message))) + encode(message) for message in messages)
    file.write_bytes(data[: len(data) - num_cut_bytes])
    return str(file)


def make_configure(config: EngineConfig, protocol_version: int = PROTOCOL_VERSION) -> Configure:
    return Configure(protocol_version, __version__, 0, json.dumps(config.to_wire()), "")


def make_messages(config: EngineConfig) -> list[Message]:
    """As an engine sends them: probes in between, Stop last."""
    first, *others = make_steps()
    return [make_configure(config), Control(ControlAction.PROBE), first, *others, Stop()]


def run_live(config: EngineConfig) -> bytes:
    runner = ModelRunner(config)
    return b"".join(handle.result().tokens for handle in [runner.execute(step) for step in make_steps()])


def read_report(text: str) -> dict[str, object]:
    return json.loads(text.splitlines()[-1])


def test_replay_as_a_program_gives_the_tokens_of_the_live_run(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder)
    recording = write_recording(tmp_path / "r", make_messages(config))
    command = [sys.executable, "-m", "minisgl_worker", "--replay", recording, "--repeat", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    report, tokens = read_report(done.stdout), run_live(config)
    assert (done.returncode, done.stderr) == (0, "")
    assert (report["num_steps"], report["num_tokens"]) == (5, len(tokens) // 4) == (5, 9)
    assert report["digest"] == hashlib.sha256(tokens).hexdigest()[:16] and report["is_repeatable"]
    assert report["steps_per_s"] > 0 and report["decode_step_ms_max"] >= report["decode_step_ms_median"] > 0


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_steps_in_flight_change_no_token(folder: Path, tmp_path: Path, capsys, depth: int) -> None:
    config = make_config(folder, max_steps_in_flight=depth)
    assert replay(write_recording(tmp_path / "r", make_messages(config))) == 0
    assert read_report(capsys.readouterr().out)["digest"] == hashlib.sha256(run_live(config)).hexdigest()[:16]


def test_expected_digest_decides_the_exit_code(folder: Path, tmp_path: Path, capsys) -> None:
    recording = write_recording(tmp_path / "r", make_messages(make_config(folder)))
    replay(recording)
    digest = read_report(capsys.readouterr().out)["digest"]
    assert replay(recording, expect=digest) == 0
    assert replay(recording, expect="0123456789abcdef") == 1
    captured = capsys.readouterr()
    assert digest in captured.err and "0123456789abcdef" in captured.err
    assert read_report(captured.out)["digest"] == digest, "the report comes all the same"


def test_recording_cut_off_by_a_crash_is_replayed_up_to_there(folder: Path, tmp_path: Path, capsys) -> None:
    messages = make_messages(make_config(folder))[:-1]
    assert replay(write_recording(tmp_path / "r", messages, num_cut_bytes=3)) == 0
    captured = capsys.readouterr()
    assert read_report(captured.out)["num_steps"] == 4
    assert "left out" in captured.err and len(captured.err.splitlines()) == 1


def test_pool_that_memory_had_sized_gets_the_pages_of_the_recording(folder: Path, tmp_path: Path) -> None:
    """This machine may have less memory than the one where the recording was made."""
    recording = read_recording(
        Path(write_recording(tmp_path / "r", make_messages(make_config(folder, num_pages=None))))
    )
    assert make_replay_config(recording).num_pages == 13, "page 12, in a grant, is the last one named"
    assert replay(str(tmp_path / "r")) == 0


def test_recording_of_several_ranks_is_replayed_on_one(folder: Path, tmp_path: Path, capsys) -> None:
    recording = write_recording(tmp_path / "r", make_messages(make_config(folder, tp_size=2)))
    expected = hashlib.sha256(run_live(make_config(folder))).hexdigest()[:16]
    assert replay(recording, expect=expected) == 0


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0ab", b"\x01\0\0\0\xc0", struct.pack("<I", 2) + encode(Stop())])
def test_file_that_is_no_recording_is_one_clear_line(tmp_path: Path, capsys, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert replay(str(tmp_path / "file")) == 3
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and error.startswith("minisgl_worker: ")


def test_recording_of_another_protocol_or_a_missing_file_or_model_is_refused(folder: Path, tmp_path: Path, capsys):
    old = write_recording(tmp_path / "r", [make_configure(make_config(folder), PROTOCOL_VERSION + 1)])
    assert replay(old) == 3 and f"protocol {PROTOCOL_VERSION + 1}" in capsys.readouterr().err
    assert replay(str(tmp_path / "gone")) == 3 and "gone" in capsys.readouterr().err
    moved = write_recording(tmp_path / "m", [make_configure(make_config(tmp_path / "moved"))])
    assert replay(moved) == 3 and "moved" in capsys.readouterr().err
