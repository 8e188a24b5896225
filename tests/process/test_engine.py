"""The engine process with a fake worker: faults of workers and frontends, signals, addresses, what is left behind."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from model_folders import write_folder
from waiting import wait_until

from minisgl.core import SamplingParams
from minisgl.errors import EngineDead, EngineUnreachable, InvalidRequest, MinisglError, Overloaded
from minisgl.llm import LLM
from minisgl.protocol import PROTOCOL_VERSION, Hello, Refused, Welcome
from minisgl.transport import ClientChannel, make_context

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]
# Private folders of the engines started here alone: others may come and go on this machine.
TEMPORARY = Path(tempfile.gettempdir()) / f"engines-{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def temporary_folder() -> Iterator[None]:
    TEMPORARY.mkdir()
    yield
    shutil.rmtree(TEMPORARY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "m", vocab_size=100)


def start(
    folder: Path, address: str, *flags: str, fault: str = "", corruption: str = "", **popen: object
) -> subprocess.Popen[str]:
    """An engine with the fake worker; its readiness line is not waited for."""
    module = "tests.process.corrupted_engine" if corruption else "minisgl.engine"
    command = [sys.executable, "-m", module, "--model", str(folder), "--address", address,
               "--worker-module", "tests.process.fake_worker", "--num-pages", "64", *flags]  # fmt: skip
    environment = {**os.environ, "MINISGL_FAKE_FAULT": fault, "MINISGL_CORRUPTION": corruption,
                   "TMPDIR": str(TEMPORARY)}  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
    )  # fmt: skip


@contextlib.contextmanager
def running(folder: Path, address: str, *flags: str, **arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A ready engine. At the end nothing of it may be left: no process, no socket, no private folder."""
    before = private_folders()
    engine = start(folder, address, *flags, **arguments)
    try:
        assert engine.stdout is not None and address.split(":")[0] in engine.stdout.readline()
        children = children_of(engine.pid)
        assert children, "the engine has no worker"
        yield engine
        if engine.poll() is None:
            engine.send_signal(signal.SIGTERM)
        engine.wait(15)
        wait_until(lambda: not any(is_alive(child) for child in children), 5)
        assert private_folders() <= before
        if address.startswith("ipc://"):
            assert not Path(address.removeprefix("ipc://")).exists()
    finally:
        engine.kill()
        engine.communicate()


def private_folders() -> set[Path]:
    return set(TEMPORARY.glob("minisgl-*"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.mark.parametrize(
    ("corruption", "text"),
    [("released_without_owner", "are released but in no page table"), ("free_twice", "are free twice")],
)
def test_corrupted_books_end_the_engine_with_a_code_of_their_own(folder, address, corruption, text) -> None:
    """At once where an operation meets them, else when nothing is left to do."""
    with running(folder, address, corruption=corruption) as engine, LLM(engine=address) as llm:
        with pytest.raises(EngineDead, match=text):
            llm.generate([[1, 2]], SHORT)
            llm.generate([[1, 2]], LONG)
        assert engine.wait(5) == 7


def test_worker_that_is_silent_while_it_starts_is_not_frozen(folder, address) -> None:
    """As one that imports torch on a busy machine."""
    with running(folder, address, fault="silent_loading"), LLM(engine=address) as llm:
        assert len(llm.generate([[1, 2]], SHORT)[0]["token_ids"]) == 5


def test_lost_page_is_told_and_ends_nothing(folder, address, tmp_path) -> None:
    with running(folder, address, corruption="lost") as engine, LLM(engine=address) as llm:
        for _ in range(3):
            assert len(llm.generate([[1, 2]], SHORT)[0]["token_ids"]) == 5
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(15) == 0
        assert engine.stderr is not None
        assert [line for line in engine.stderr if "leaked" in line] == [
            "minisgl engine: ERROR 1 KV pages leaked after 5 steps\n"
        ]


@pytest.mark.parametrize(
    ("fault", "text", "code", "bound_s"),
    [
        ("kill:20", "rank 0.*SIGKILL", 5, 1.5),
        ("exit0:20", "rank 0.*exit code 0", 5, 1.5),
        ("raise:20", "rank 0.*step 20.*RuntimeError.*scripted", 5, 1.5),
        ("wrong_step:20", "rank 0.*step 21.*expected step 20", 5, 1.5),
        ("repeat:20", "rank 0.*step 20.*expected step 21", 5, 1.5),
        ("freeze:20", "rank 0.*frozen", 6, 6.0),
        ("hang:20", "rank 0.*stuck.*2", 6, 4.5),
    ],
)
def test_worker_fault_reaches_every_frontend_and_ends_the_engine(folder, address, fault, text, code, bound_s) -> None:
    with running(folder, address, "--step-timeout-s", "2" if fault.startswith("hang") else "60", fault=fault) as engine:
        with LLM(engine=address) as one, LLM(engine=address) as two:
            stream = two.stream([5], LONG)
            next(stream)
            started = time.monotonic()
            with pytest.raises(EngineDead, match=text):
                one.generate([[1, 2]] * 3, LONG)
            assert time.monotonic() - started < bound_s
            with pytest.raises(EngineDead, match=text):
                list(stream)
            with pytest.raises(EngineDead, match=text):  # it stays so
                one.generate([[1]], SHORT)
        assert engine.wait(5) == code
    with running(folder, address), LLM(engine=address) as again:  # the address is free at once
        assert len(again.generate([[1]], SHORT)[0]["token_ids"]) == 5


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("peer_lost:20@0,late_kill:20@1", r"rank 1 ended: killed by SIGKILL"),
        ("peer_lost:20@1,late_raise:20@0", r"rank 0 failed in step 20: RuntimeError: a scripted fault"),
        ("peer_lost:20@1", r"rank 1 failed in step 20: PeerLost: the other side is gone"),
    ],
)
def test_rank_that_only_lost_another_is_not_blamed(folder, address, fault, text) -> None:
    """Its word comes first; what became of the other is waited for, but not for ever."""
    with running(folder, address, "--tp-size", "2", fault=fault) as engine:
        with LLM(engine=address) as llm, pytest.raises(EngineDead, match=text):
            started = time.monotonic()
            while time.monotonic() - started < 10:
                llm.generate([[1, 2]], LONG)
        assert time.monotonic() - started < 4
        assert engine.wait(5) == 5


@pytest.mark.parametrize(
    ("fault", "text", "code"),
    [
        ("die_loading", "rank 0.*SIGKILL", 3),
        ("fail_loading", "rank 0.*OSError.*on fire", 3),
        ("bad_model", "on fire", 3),
        ("wrong_version", "9.9", 5),
        ("never_ready", "rank 0 was not ready within 1", 3),
    ],
)
def test_worker_that_does_not_become_ready_is_one_clear_line(folder, address, fault, text, code) -> None:
    before = private_folders()
    engine = start(folder, address, "--start-timeout-s", "1.5", fault=fault)
    out, err = engine.communicate(timeout=10)
    assert engine.returncode == code and out == ""
    assert re.search(text, err), err
    assert len(err.strip().splitlines()) == 1, err
    assert private_folders() <= before


def test_failed_row_ends_its_own_request_only(folder, address) -> None:
    with running(folder, address, fault="failed_row:6"), LLM(engine=address) as llm:
        stream = llm.stream([7] * 3, LONG)
        next(stream)
        with pytest.raises(MinisglError, match="step 6"):
            list(stream)
        assert len(llm.generate([[1]], SHORT)[0]["token_ids"]) == 5


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(folder, address) -> None:
    with running(folder, address) as engine, LLM(engine=address) as llm:
        stream = llm.stream([5], LONG)
        next(stream)
        engine.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(EngineUnreachable, match="shutting down"):
            llm.generate([[1]], SHORT)
        deltas = list(stream)
        assert deltas[-1]["finish_reason"] == "length" and sum(len(d["token_ids"]) for d in deltas) == 199
        assert engine.wait(5) == 0


def test_second_signal_ends_the_engine_at_once(folder, address) -> None:
    with running(folder, address) as engine, LLM(engine=address) as llm:
        stream = llm.stream([5], SamplingParams(max_tokens=240, ignore_eos=True))
        next(stream)
        for _ in range(2):
            engine.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert engine.wait(2) == 130
        with pytest.raises(EngineDead):
            list(stream)


def test_sigterm_while_loading_ends_everything(folder, address) -> None:
    engine = start(folder, address, fault="never_ready")
    wait_until(lambda: children_of(engine.pid), 5)
    children = children_of(engine.pid)
    engine.send_signal(signal.SIGTERM)
    engine.communicate(timeout=5)
    assert engine.returncode != 0
    wait_until(lambda: not any(is_alive(child) for child in children), 5)


def test_engine_killed_takes_its_workers_along_and_the_address_is_free(folder, address) -> None:
    engine = start(folder, address)
    assert engine.stdout is not None and engine.stdout.readline()
    children = children_of(engine.pid)
    with LLM(engine=address) as llm:
        engine.kill()
        engine.communicate()
        wait_until(lambda: not any(is_alive(child) for child in children), 5)
        with pytest.raises(MinisglError):
            llm.generate([[1]], SHORT)
    with running(folder, address), LLM(engine=address) as llm:  # though its socket and lock file are still there
        assert llm.generate([[1]], SHORT)


def test_second_engine_at_an_address_is_refused_with_the_first_ones_pid(folder, address) -> None:
    with running(folder, address) as engine:
        second = start(folder, address)
        _, err = second.communicate(timeout=10)
        assert second.returncode == 4 and str(engine.pid) in err and len(err.strip().splitlines()) == 1
        with LLM(engine=address) as llm:
            assert llm.generate([[1]], SHORT)


@pytest.mark.parametrize(
    ("address", "code", "text"),
    [
        ("ipc:///" + "x" * 120, 2, "107"),
        ("ipc:///no/such/folder/e.sock", 3, "No such file"),
        ("tcp://*:5555", 2, "every interface"),
        ("tcp://0.0.0.0:5555", 2, "every interface"),
        ("tcp://127.0.0.1:99999", 2, "tcp://127.0.0.1:PORT"),
        ("http://x", 2, "ipc:///path"),
    ],
)
def test_unusable_address_is_one_clear_line(folder, address, code, text) -> None:
    engine = start(folder, address)
    _, err = engine.communicate(timeout=10)
    assert engine.returncode == code and text in err and len(err.strip().splitlines()) == 1, err


def test_tcp_port_that_is_taken_is_refused(folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = start(folder, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        _, err = engine.communicate(timeout=10)
        assert engine.returncode == 4 and "in use" in err.lower()


def test_frontend_that_is_killed_frees_its_requests_and_others_go_on(folder, address) -> None:
    script = (
        "import sys\nfrom minisgl.core import SamplingParams\nfrom minisgl.llm import LLM\n"
        f"llm = LLM(engine={address!r})\n"
        "stream = llm.stream([5], SamplingParams(max_tokens=240, ignore_eos=True))\nnext(stream)\n"
        "print('streaming', flush=True)\nimport time; time.sleep(60)"
    )
    with running(folder, address, "--max-running-req", "1"), LLM(engine=address) as llm:
        expected = llm.generate([[1, 2]], SHORT)[0]["token_ids"]
        user = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert user.stdout is not None and user.stdout.readline()
        user.kill()
        user.communicate()
        started = time.monotonic()
        assert llm.generate([[1, 2]], SHORT)[0]["token_ids"] == expected
        assert time.monotonic() - started < 4.5
        wait_until(lambda: llm.stats()["pages_used"] == 0, 4)


def test_malformed_frames_are_counted_and_do_no_harm(folder, address) -> None:
    with running(folder, address), LLM(engine=address) as llm:
        context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        raw.connect(address)
        for frame in (b"", b"junk", b"\x91" * 1000, os.urandom(100), b"\x93\x01\x01\xa1x"):
            raw.send(frame)
        raw.send_multipart([b"one", b"two", b"three"])
        assert len(llm.generate([[1]], SHORT)[0]["token_ids"]) == 5
        context.destroy(0)


def test_other_protocol_version_is_refused_with_both_numbers(folder, address) -> None:
    with running(folder, address):
        context = make_context()
        channel = ClientChannel(context, address)
        channel.send(Hello(PROTOCOL_VERSION + 1, "99"))
        answer = channel.receive(5)
        assert isinstance(answer, Refused) and answer.protocol_version == PROTOCOL_VERSION
        channel.send(Hello(PROTOCOL_VERSION, "x"))
        assert isinstance(channel.receive(5), Welcome)
        context.destroy(0)


def test_foreign_bytes_on_a_tcp_port_are_ignored(folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    with running(folder, address):
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        with LLM(engine=address) as llm:
            assert len(llm.generate([[1]], SHORT)[0]["token_ids"]) == 5


def test_full_queue_is_overloaded(folder, address) -> None:
    with running(folder, address, "--max-queued-req", "1", "--max-running-req", "1"), LLM(engine=address) as llm:
        with pytest.raises(Overloaded, match="1"):
            llm.generate([[1]], SamplingParams(n=8, temperature=1.0, max_tokens=5))
        assert llm.generate([[1]], SHORT)


def test_request_past_the_limits_is_refused_by_the_frontend(folder, address) -> None:
    with running(folder, address), LLM(engine=address) as llm:
        with pytest.raises(InvalidRequest, match=r"prompt 1.*100"):
            llm.generate([[1], [100]], SHORT)
        with pytest.raises(InvalidRequest, match="256"):
            llm.generate([[1] * 256], SHORT)


def test_engine_survives_a_closed_terminal(folder, address) -> None:
    before = start(folder, address)
    assert before.stdout is not None and before.stderr is not None and before.stdout.readline()
    before.stdout.close()
    before.stderr.close()
    before.send_signal(signal.SIGHUP)
    with LLM(engine=address) as llm:
        assert llm.generate([[1]], SHORT)
    before.send_signal(signal.SIGTERM)
    assert before.wait(5) == 0


def test_paused_tree_is_no_fault(folder, address) -> None:
    with running(folder, address) as engine, LLM(engine=address) as llm:
        everyone = [engine.pid, *children_of(engine.pid)]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        assert len(llm.generate([[1]], SHORT)[0]["token_ids"]) == 5


def test_idle_engine_takes_no_processor_time(folder, address) -> None:
    def used(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    with running(folder, address) as engine:
        time.sleep(0.5)
        before = used(engine.pid)
        time.sleep(2)
        assert used(engine.pid) - before <= 4, "clock ticks of 10 ms"
