"""The worker process over real channels, and the replay of what it was sent."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Control,
    ControlAction,
    Failed,
    Heartbeat,
    Message,
    Ready,
    Result,
    Step,
    Stop,
    Stopped,
    encode,
)  # fmt: skip
from minisgl.transport import ChannelBlocked, PairChannel, make_context
from tests.worker.checkpoints import make_admit, make_step, read_tokens, write_checkpoint

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("worker") / "m")


class Harness:
    """The engine's side of one worker."""

    def __init__(self, folder: Path):
        self.context = make_context()
        addresses = [f"ipc://{folder}/{name}" for name in ("steps", "results")]
        self.steps, self.results = (PairChannel(self.context, address, bind=True) for address in addresses)
        death_read, self.death_write = os.pipe()
        command = [sys.executable, "-m", "minisgl_worker", "--steps", addresses[0], "--results", addresses[1],
                   "--death-fd", str(death_read)]  # fmt: skip
        self.process = subprocess.Popen(
            command, pass_fds=[death_read], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        os.close(death_read)

    def send(self, message: Message, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                return self.steps.send(message)
            except ChannelBlocked:  # not connected so far
                assert time.monotonic() < end
                time.sleep(0.02)

    def receive(self, kind: type, seconds: float = 30) -> Message:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message = self.results.receive(0.5)
            if isinstance(message, kind):
                return message
            assert message is None or isinstance(message, Heartbeat), message
        raise AssertionError(f"no {kind.__name__} came")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.context.destroy(0)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def configure(folder: Path, version: str = __version__, **options: object) -> Configure:
    values = {"device": "cpu", "dtype": "float32", "num_pages": 16, "page_size": 4, "max_running_req": 2, **options}
    config = EngineConfig.from_options(folder, values)
    return Configure(PROTOCOL_VERSION, version, 0, json.dumps(config.to_wire()), "")


def make_steps() -> list[Step]:
    admit = make_admit(0, [4, 8, 15, 16], [3, 4, 5])
    return [
        make_step(0, admits=(admit,), prefills=(0, 0, 4, 1)),
        make_step(1, decode=[0], run_decode=True),
        *(make_step(i, run_decode=True) for i in range(2, 6)),
    ]


def test_worker_answers_steps_in_order_and_stops_with_exit_code_0(harness: Harness, folder: Path) -> None:
    harness.send(configure(folder))
    ready = harness.receive(Ready)
    assert (ready.num_pages, ready.vocab_size, ready.max_seq_len) == (16, 96, 256)
    for step in make_steps():
        harness.send(step)
    results = [harness.receive(Result) for _ in make_steps()]
    assert [result.step_id for result in results] == list(range(6))
    maps = Path(f"/proc/{harness.process.pid}/maps").read_text()
    assert "libtorch" in maps and "tokenizers" not in maps, "a worker needs torch and no transformers"
    harness.send(Control(ControlAction.PROBE))
    end = time.monotonic() + 5
    while harness.receive(Heartbeat).num_handled < 8:
        assert time.monotonic() < end
    harness.send(Stop())
    harness.receive(Stopped)
    assert harness.process.wait(5) == 0


@pytest.mark.parametrize(
    ("message", "kind", "text", "code"),
    [
        (lambda folder: configure(folder, version="9.9"), "ProtocolMismatch", "9.9", 3),
        (lambda folder: configure(folder / "gone"), "ModelLoadError", "gone", 3),
        (lambda folder: configure(folder, attention_backend="triton"), "ModelLoadError", "triton", 3),
        (lambda folder: Stop(), "ProtocolMismatch", "Configure", 3),
    ],
)
def test_worker_that_cannot_start_says_why(harness: Harness, folder: Path, message, kind, text, code) -> None:
    harness.send(message(folder))
    failed = harness.receive(Failed)
    assert failed.kind == kind and text in failed.text and failed.step_id is None
    assert harness.process.wait(10) == code


def test_exception_in_a_step_is_failed_with_its_number_and_ends_the_worker(harness: Harness, folder: Path) -> None:
    harness.send(configure(folder))
    harness.receive(Ready)
    harness.send(make_step(0, admits=(make_admit(0, [4], [3]),), prefills=(0, 0, 1, 1)))
    harness.receive(Result)
    harness.send(make_step(1, decode=[77], run_decode=True))
    failed = harness.receive(Failed)
    assert failed.step_id == 1 and failed.kind == "IndexError"
    assert harness.process.wait(10) == 5


def test_worker_ends_when_its_engine_is_gone(harness: Harness, folder: Path) -> None:
    harness.send(configure(folder))
    harness.receive(Ready)
    os.close(harness.death_write)
    assert harness.process.wait(2) == 1


def test_replay_gives_the_tokens_of_the_live_run(harness: Harness, folder: Path, tmp_path: Path) -> None:
    messages = [configure(folder), *make_steps()]
    recording = tmp_path / "recording"
    recording.write_bytes(b"".join(struct.pack("<I", len(encode(m))) + encode(m) for m in messages))
    for message in messages:
        harness.send(message)
    harness.receive(Ready)
    live = [token for _ in make_steps() for token in read_tokens(harness.receive(Result).tokens)]
    command = [sys.executable, "-m", "minisgl_worker", "--replay", str(recording), "--repeat", "2"]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["num_tokens"] == len(live) == 6 and report["is_repeatable"]
    assert report["digest"] == hashlib.sha256(np.array(live, "<u4").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0ab", b"\x01\0\0\0\xc0", struct.pack("<I", 2) + encode(Stop())])
def test_replay_of_something_else_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    command = [sys.executable, "-m", "minisgl_worker", "--replay", str(tmp_path / "file")]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 3 and len(run.stderr.strip().splitlines()) == 1 and "minisgl_worker:" in run.stderr
