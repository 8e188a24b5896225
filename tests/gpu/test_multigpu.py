"""Tensor parallelism over several GPUs: `pytest tests/gpu -m multigpu`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.errors import EngineDead
from minisgl.llm import LLM
from tests.worker.checkpoints import write_checkpoint

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, {NUM_GPUS} are visible"),
]
RANKS = pytest.mark.parametrize("num_ranks", [n for n in (2, 4, 8) if n <= max(2, NUM_GPUS)])

ROOT = Path(__file__).resolve().parents[2]
CLEAR_GAP = 0.25  # of the top two logits; below it, bf16's rounding may decide
PROMPTS = [[(7 * i + j * j) % 900 + 3 for j in range(3 + 11 * i)] for i in range(12)]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=2)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 heads; 4 KV heads, which 8 ranks replicate; a vocabulary that no number of ranks divides. Peaked logits."""
    return write_checkpoint(
        tmp_path_factory.mktemp("multigpu"), vocab_size=1001, hidden_size=512, intermediate_size=1024,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
        initializer_range=0.1,
    )  # fmt: skip


@contextlib.contextmanager
def running(folder: Path, num_ranks: int, **options: object) -> Iterator[LLM]:
    with LLM(folder, device="cuda", tp_size=num_ranks, num_pages=2048, max_running_req=16, **options) as llm:
        yield llm


@RANKS
def test_sums_and_gathers_equal_their_definition_at_once_and_in_graphs(tmp_path: Path, num_ranks: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("collectives_rank.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), f"file://{tmp_path}/rendezvous"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(outputs)


@RANKS
@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 0}], ids=["graphs", "eager"])
def test_greedy_tokens_equal_those_of_one_gpu_where_the_choice_is_clear(
    folder: Path, num_ranks: int, options: dict[str, object]
) -> None:
    """Each answer is compared up to its first unclear choice, after which the contexts may differ."""
    with running(folder, 1, dtype="bfloat16", **options) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
    with running(folder, num_ranks, dtype="bfloat16", **options) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    num_compared = 0
    for one, several in zip(expected, found, strict=True):
        for i, (a, b) in enumerate(zip(one["token_ids"], several["token_ids"], strict=True)):
            if a != b:
                assert read_gap(one["logprobs"][i]) <= CLEAR_GAP, f"token {i} is {b}, on one GPU {a}"
                break
            num_compared += 1
    assert num_compared >= len(PROMPTS) * 10, "too little was compared to say anything"


@RANKS
def test_fp32_logprobs_equal_those_of_one_gpu(folder: Path, num_ranks: int) -> None:
    """The first token's: the same context for both."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=5)
    with running(folder, 1, dtype="float32") as llm:
        expected = llm.generate(PROMPTS, params)
    with running(folder, num_ranks, dtype="float32") as llm:
        found = llm.generate(PROMPTS, params)
    for one, several in zip(expected, found, strict=True):
        assert several["token_ids"] == one["token_ids"]
        assert several["logprobs"][0]["logprob"] == pytest.approx(one["logprobs"][0]["logprob"], abs=2e-3)


@RANKS
def test_every_kind_of_sampling_runs_on_all_ranks_in_step(folder: Path, num_ranks: int) -> None:
    """An engine compares digests of the ranks' tokens every 64 steps; a difference would end it."""
    kinds = [
        SamplingParams(max_tokens=300, ignore_eos=True, temperature=1.0, seed=1),
        SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.9, top_k=30, top_p=0.9, seed=2),
        SamplingParams(max_tokens=300, ignore_eos=True, repetition_penalty=1.3, logprobs=3),
    ]
    with running(folder, num_ranks, dtype="bfloat16") as llm:
        outputs = llm.generate(PROMPTS, kinds * 4)
        again = llm.generate(PROMPTS[:1], kinds[:1])
    assert all(len(output["token_ids"]) == 300 and max(output["token_ids"]) < 1001 for output in outputs)
    assert len(again[0]["token_ids"]) == 300


@RANKS
@pytest.mark.parametrize(
    ("number", "words", "bound_s"),
    [(signal.SIGKILL, r"rank \d ended: killed by SIGKILL", 3.0), (signal.SIGSTOP, r"rank \d is frozen", 7.0)],
    ids=["killed", "frozen"],
)
def test_rank_lost_mid_batch_ends_everything_in_time(
    folder: Path, num_ranks: int, number: int, words: str, bound_s: float
) -> None:
    with running(folder, num_ranks, dtype="bfloat16") as llm:
        workers = find_workers()
        assert len(workers) == num_ranks
        lost_at: list[float] = []

        def lose() -> None:
            time.sleep(1.0)
            lost_at.append(time.monotonic())
            os.kill(workers[-1], number)

        thread = threading.Thread(target=lose)
        thread.start()
        with pytest.raises(EngineDead, match=words):
            while True:
                llm.generate(PROMPTS, LONG)
        thread.join()
        assert time.monotonic() - lost_at[0] < bound_s
    deadline = time.monotonic() + 10
    while left := [pid for pid in workers if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def read_gap(entry: dict[str, object]) -> float:
    """Of the two highest logits: log-probabilities differ as logits do."""
    (_, best), (_, second) = entry["top"]
    return best - second


def find_workers() -> list[int]:
    """The worker processes below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if "minisgl_worker" in (entry / "cmdline").read_text() and is_alive(int(entry.name)):
                    found.append(int(entry.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
