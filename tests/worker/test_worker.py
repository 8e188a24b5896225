"""The worker process over real channels."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
)  # fmt: skip
from minisgl.transport import ChannelBlocked, PairChannel, make_context
from tests.worker.checkpoints import make_admit, make_step, write_checkpoint

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SCRIPTED_WORKER = Path(__file__).with_name("scripted_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("worker") / "m")


class Harness:
    """The engine's side of one worker. `program`: what to run instead of the real one."""

    def __init__(self, folder: Path, program: tuple[str, ...] = ("-m", "minisgl_worker")):
        self.context = make_context()
        addresses = [f"ipc://{folder}/{name}" for name in ("steps", "results")]
        self.steps, self.results = (PairChannel(self.context, address, bind=True) for address in addresses)
        death_read, self.death_write = os.pipe()
        command = [sys.executable, *program, "--steps", addresses[0], "--results", addresses[1],
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


def configure(folder: Path, version: str = __version__, rank: int = 0, **options: object) -> Configure:
    values = {"device": "cpu", "dtype": "float32", "num_pages": 16, "page_size": 4, "max_running_req": 2, **options}
    config = EngineConfig.from_options(folder, values)
    return Configure(PROTOCOL_VERSION, version, rank, json.dumps(config.to_wire()), "")


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
    harness.process.send_signal(signal.SIGINT)  # as a terminal does to all that run in it: the engine decides
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


def test_rank_that_is_told_to_stop_waits_for_the_others(folder: Path, tmp_path: Path) -> None:
    """They may still read from its memory, so it is not to end before they have come as far."""
    ranks = []
    try:
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            ranks.append(Harness(tmp_path / str(rank)))
            start = configure(folder, rank=rank, tp_size=2)
            ranks[rank].send(replace(start, rendezvous=f"file://{tmp_path}/rendezvous"))
        for harness in ranks:
            harness.receive(Ready)
        first, second = ranks
        before = first.receive(Heartbeat).num_collectives
        first.send(Stop())
        end = time.monotonic() + 30
        while first.receive(Heartbeat).num_collectives == before:  # it has not entered the exchange so far
            assert time.monotonic() < end
        for _ in range(3):
            first.receive(Heartbeat)  # and no Stopped, which would not be taken for one
        second.send(Stop())
        for harness in ranks:
            harness.receive(Stopped)
            assert harness.process.wait(30) == 0
    finally:
        for harness in ranks:
            harness.close()


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


def test_failure_between_steps_names_none(harness: Harness, folder: Path) -> None:
    harness.send(configure(folder))
    harness.receive(Ready)
    harness.send(make_steps()[0])
    harness.receive(Result)
    harness.send(configure(folder))
    failed = harness.receive(Failed)
    assert failed.step_id is None and failed.kind == "ProtocolMismatch" and "Configure is not for" in failed.text
    assert harness.process.wait(10) == 3


def test_worker_ends_when_its_engine_is_gone(harness: Harness, folder: Path) -> None:
    harness.send(configure(folder))
    harness.receive(Ready)
    os.close(harness.death_write)
    assert harness.process.wait(2) == 1


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    """scripted(script, rank=0) -> a configured worker whose model and device follow the script."""
    made: list[Harness] = []

    def start(script: str = "", rank: int = 0) -> Harness:
        made.append(Harness(tmp_path, (str(SCRIPTED_WORKER), "--script", script)))
        made[-1].send(configure(tmp_path, rank=rank))
        made[-1].receive(Ready)
        return made[-1]

    yield start
    for harness in made:
        harness.close()


def receive_all(harness: Harness, seconds: float) -> list[Message]:
    end, messages = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        if (message := harness.results.receive(left)) is not None:
            messages.append(message)
    return messages


def test_heartbeats_are_punctual_while_results_flow(scripted: Callable[..., Harness]) -> None:
    """The engine reads the progress from them alone: a busy worker without heartbeats would count as stuck."""
    harness = scripted()
    started, step_id, beats = time.monotonic(), 0, []
    while time.monotonic() - started < 2.2:
        harness.send(make_step(step_id))
        while not isinstance(message := harness.results.receive(5), Result):
            beats.append(message)
        step_id += 1
        time.sleep(0.01)
    assert all(isinstance(beat, Heartbeat) for beat in beats) and 3 <= len(beats) <= 5
    handled = [beat.num_handled for beat in beats]
    assert handled == sorted(handled) and handled[-1] > handled[-2] > 10


def test_slow_device_is_alive_but_makes_no_progress(scripted: Callable[..., Harness]) -> None:
    harness = scripted("hang:1")
    harness.send(make_step(0))
    harness.receive(Result)
    harness.send(make_step(1))
    harness.send(Control(ControlAction.PROBE))
    beats = receive_all(harness, 1.7)
    assert len(beats) >= 3 and {beat.num_handled for beat in beats[1:]} == {2}  # the Configure and step 0


def test_ranks_but_the_first_count_and_say_nothing(scripted: Callable[..., Harness]) -> None:
    harness = scripted(rank=1)
    for step_id in range(3):
        harness.send(make_step(step_id))
    while harness.receive(Heartbeat).num_handled < 4:
        pass
    harness.send(Stop())
    assert harness.receive(Stopped).rank == 1
    assert harness.process.wait(5) == 0


def test_stop_comes_after_every_result(scripted: Callable[..., Harness]) -> None:
    harness = scripted("slow:0")
    for step_id in range(4):
        harness.send(make_step(step_id))
    harness.send(Stop())
    assert [harness.receive(Result).step_id for _ in range(4)] == [0, 1, 2, 3]
    harness.receive(Stopped)
    assert harness.process.wait(5) == 0


def test_fault_of_the_device_names_the_step_that_it_belongs_to(scripted: Callable[..., Harness]) -> None:
    """It shows while later steps are launched already."""
    harness = scripted("fault:1")
    for step_id in range(4):
        harness.send(make_step(step_id))
    assert harness.receive(Result).step_id == 0
    failed = harness.receive(Failed)
    assert (failed.step_id, failed.kind, failed.text) == (1, "RuntimeError", "a scripted fault of the device")
    assert harness.process.wait(5) == 5


def test_failure_is_told_and_ends_the_process_though_the_device_hangs(scripted: Callable[..., Harness]) -> None:
    harness = scripted("hang:0,raise:1")
    started = time.monotonic()
    harness.send(make_step(0))
    harness.send(make_step(1))
    failed = harness.receive(Failed)
    assert (failed.step_id, failed.kind) == (1, "MemoryError")
    assert harness.process.wait(5) == 5
    assert time.monotonic() - started < 4
