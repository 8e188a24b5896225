"""The whole product in float64, where answers do not depend on how the work is cut: no setting changes a token."""

import random
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from tests.worker.checkpoints import VOCAB_SIZE, write_checkpoint

SHARED = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(30)]
PROMPTS = [SHARED[: 4 * i] + [random.Random(i).randrange(VOCAB_SIZE) for _ in range(3 + 3 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=24 + i, ignore_eos=True) for i in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("end_to_end") / "m")


def run(folder: Path, **options: object) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of all prompts, asked twice, and the engine's counters."""
    with LLM(str(folder), dtype="float64", device="cpu", **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)
        return [output["token_ids"] for output in outputs], llm.stats()


@pytest.mark.time_limit(240)
def test_no_setting_changes_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected, stats = run(folder, num_pages=512, page_size=4, max_running_req=1, cache_type="naive")
    assert expected[:8] == expected[8:] and stats["prefix_hit_tokens"] == stats["preemptions"] == 0
    tokens, stats = run(folder, num_pages=512, page_size=4)
    assert tokens == expected and stats["prefix_hit_tokens"] > 100
    tokens, stats = run(folder, num_pages=512, page_size=1, max_extend_tokens=7, schedule_policy="lof")
    assert tokens == expected and stats["prefix_hit_tokens"] > 100
    tokens, stats = run(folder, num_pages=28, page_size=4, max_running_req=8, cache_type="naive", max_extend_tokens=16)
    assert tokens == expected and stats["preemptions"] > 0
    assert stats["pages_used"] == 0 and stats["running"] == stats["waiting"] == 0
