"""`LLM` with an engine of its own: everything that it starts ends, and whatever ends early is told with its cause."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from model_folders import write_folder, write_safetensors
from tokenizers_made_here import make_byte_tokenizer

from minisgl.core import SamplingParams
from minisgl.errors import EngineDead, ModelLoadError
from minisgl.llm import LLM

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
OPTIONS = {"device": "cpu", "num_pages": 64, "use_dummy_weight": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "dummy", make_byte_tokenizer())


def read_processes() -> dict[int, tuple[int, str, str]]:
    """pid -> (parent, state, command line)"""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), fields[0], command)
    return found


def find_children(module: str = "") -> list[int]:
    """Living processes below this one, zombies too, whose command line has `module`."""
    table, found, todo = read_processes(), [], [os.getpid()]
    while todo:
        parent = todo.pop()
        below = [pid for pid, (above, _, _) in table.items() if above == parent]
        todo += below
        found += [pid for pid in below if module in table[pid][2]]
    return found


def wait_gone(pids: list[int], within_s: float) -> None:
    end = time.monotonic() + within_s
    while left := [pid for pid in pids if read_processes().get(pid, (0, "X", ""))[1] not in "ZX"]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.02)


@pytest.fixture
def llm(folder):
    before = find_children()
    with LLM(folder, "float32", **OPTIONS) as llm:
        yield llm
    assert sorted(find_children()) == sorted(before), "close() left a child behind"


def test_stray_weight_file_is_told_of_in_one_line(tmp_path, capfd):
    """By one of the three processes that see it."""
    folder = write_folder(tmp_path / "m")
    write_safetensors(folder / "stray.safetensors")
    with LLM(folder, device="cpu", num_pages=4):
        pass
    lines = [line for line in capfd.readouterr().err.splitlines() if "stray.safetensors" in line]
    assert len(lines) == 1 and "ignored" in lines[0] and str(folder) in lines[0]


def test_closed_llm_leaves_no_process_and_no_file(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = find_children()
    llm = LLM(folder, torch.float32, **OPTIONS)
    assert len(llm.generate("ab", PARAMS)[0]["token_ids"]) == 3
    started = time.monotonic()
    llm.close()
    llm.close()
    assert time.monotonic() - started < 10
    assert sorted(find_children()) == sorted(before)
    assert list(tmp_path.glob("minisgl*")) == []


def test_killed_engine_is_seen_at_once_and_takes_its_worker_along(llm):
    (engine,) = find_children("minisgl.engine")
    workers = find_children("minisgl_worker")
    caught: list[tuple[float, EngineDead]] = []

    def call() -> None:
        with pytest.raises(EngineDead) as error:
            llm.generate([[1]] * 4, SamplingParams(max_tokens=400, ignore_eos=True))
        caught.append((time.monotonic(), error.value))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.2)
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    thread.join(10)
    when, error = caught[0]
    assert when - killed < 1.0 and "SIGKILL" in str(error)
    wait_gone(workers, 5)
    with pytest.raises(EngineDead, match="SIGKILL"):
        llm.generate([[1]], PARAMS)


def test_frozen_engine_is_dead_after_the_lease_and_is_cleared_away(llm):
    (engine,) = find_children("minisgl.engine")
    workers = find_children("minisgl_worker")
    os.kill(engine, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EngineDead, match="has not answered"):
        llm.generate([[1]], PARAMS)
    assert time.monotonic() - started < 6
    started = time.monotonic()
    llm.close()
    assert time.monotonic() - started < 10
    wait_gone([engine, *workers], 5)


def test_killed_worker_is_named(llm):
    (worker,) = find_children("minisgl_worker")
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"rank 0.*SIGKILL"):
        llm.generate([[1]] * 4, SamplingParams(max_tokens=400, ignore_eos=True))


def test_forked_child_that_exits_leaves_the_engine_alone(llm):
    child = os.fork()
    if child == 0:
        try:
            llm.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(llm.generate([[1]], PARAMS)[0]["token_ids"]) == 3


def test_llm_made_in_a_thread_outlives_it(folder):
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(LLM(folder, "float32", **OPTIONS)))
    thread.start()
    thread.join()
    time.sleep(0.5)  # a parent-death signal tied to the thread would have come by now
    with made[0] as llm:
        assert len(llm.generate([[1]], PARAMS)[0]["token_ids"]) == 3


def test_tokenizer_that_fails_ends_the_engine_that_was_starting(tmp_path):
    broken = write_folder(tmp_path / "broken", make_byte_tokenizer())
    (broken / "tokenizer.json").write_text("{}")
    before = find_children()
    with pytest.raises(ModelLoadError, match="broken"):
        LLM(broken, **OPTIONS)
    assert sorted(find_children()) == sorted(before)


PROGRAM = """
import sys
from minisgl.core import SamplingParams
from minisgl.llm import LLM
llm = LLM(sys.argv[1], "float32", device="cpu", num_pages=64, use_dummy_weight=True)
print(len(llm.generate([[1]], SamplingParams(max_tokens=3, ignore_eos=True))[0]["token_ids"]))
"""


def test_program_that_just_ends_ends_cleanly(folder, tmp_path):
    """Without a main guard and without close(); its stdout holds its own words only."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert not [pid for pid, (_, _, command) in read_processes().items() if str(folder) in command]
