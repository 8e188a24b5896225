"""The runner on a GPU: graphs against eager steps, and the attention backends against the plain one."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl_worker.model_runner import ModelRunner
from tests.worker.checkpoints import GREEDY, make_admit, make_step, read_tokens

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "dtype": "float32",
}  # fmt: skip
NUM_ROWS = 20
PAGES_PER_ROW = 12
SAMPLINGS = [
    GREEDY,
    dataclasses.replace(GREEDY, temperature=0.8),
    dataclasses.replace(GREEDY, temperature=0.8, top_k=5, num_logprobs=2),
    dataclasses.replace(GREEDY, frequency_penalty=0.7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_runner(folder: Path, **options: object) -> ModelRunner:
    values = {
        "device": "cuda", "use_dummy_weight": True, "page_size": 16, "num_pages": NUM_ROWS * PAGES_PER_ROW,
        "max_running_req": NUM_ROWS, "max_extend_tokens": 2048, **options,
    }  # fmt: skip
    return ModelRunner(EngineConfig.from_options(folder, values))


def run(runner: ModelRunner, num_rows: int, num_steps: int = 6) -> list[list[int]]:
    """Tokens and log-probability ids of each step: prompts of all lengths, then decode steps with page grants."""
    rng = random.Random(num_rows)
    lengths = [rng.randint(1, 120) for _ in range(num_rows)]
    admits, prefills = [], []
    for slot, length in enumerate(lengths):
        first = slot * PAGES_PER_ROW
        tokens = [rng.randrange(1000) for _ in range(length)]
        pages = list(range(first, first + -(-length // 16)))
        admits.append(make_admit(slot, tokens, pages, sampling=SAMPLINGS[slot % 4], seed=slot))
        prefills += [slot, 0, length, 1]
    results = [runner.execute(make_step(0, admits=tuple(admits), prefills=tuple(prefills)))]
    for i in range(num_steps):
        grants = []
        for slot, length in enumerate(lengths):
            if (length + i) % 16 == 0:
                index = (length + i) // 16
                grants += [slot, index, slot * PAGES_PER_ROW + index]
        decode = list(range(num_rows)) if i == 0 else None
        results.append(runner.execute(make_step(i + 1, grants=tuple(grants), decode=decode, run_decode=True)))
    outcomes = [handle.result() for handle in results]
    return [read_tokens(outcome.tokens) + read_tokens(outcome.logprob_ids) for outcome in outcomes]


@pytest.fixture(scope="module")
def plain(folder: Path) -> ModelRunner:
    return make_runner(folder, attention_backend="torch", cuda_graph_bs=[])


@pytest.fixture(scope="module")
def with_graphs(folder: Path) -> ModelRunner:
    return make_runner(folder, cuda_graph_bs=[1, 2, 4, 8, 16])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20])
def test_every_bucket_and_its_neighbours_equal_the_plain_eager_run(plain, with_graphs, num_rows: int) -> None:
    """A batch beyond the largest bucket runs eagerly."""
    expected = run(plain, num_rows)
    assert run(with_graphs, num_rows) == expected
    assert len({tuple(tokens) for tokens in expected}) > 3


def test_steps_without_the_host_waiting_equal_steps_one_by_one(with_graphs, plain) -> None:
    """`run` launches all its steps before it looks at the first; the plain twin is made to wait after each."""
    execute = plain.execute

    def wait(step):
        handle = execute(step)
        torch.cuda.synchronize()
        return handle

    plain.execute = wait
    try:
        assert run(with_graphs, 6, num_steps=40) == run(plain, 6, num_steps=40)
    finally:
        plain.execute = execute


@pytest.mark.parametrize("name", ["fi", "triton"])
def test_steps_launched_ahead_of_a_busy_device_equal_steps_one_by_one(folder: Path, name: str) -> None:
    """What the host prepares for a step must not reach into the steps before it, which have not run yet."""
    runner = make_runner(folder, attention_backend=name, dtype="bfloat16", cuda_graph_bs=[1, 2, 4, 8])
    execute = runner.execute

    def hold_up(step):
        if step.step_id == 1:
            torch.cuda._sleep(300_000_000)
        return execute(step)

    def wait(step):
        handle = execute(step)
        torch.cuda.synchronize()
        return handle

    runner.execute = hold_up
    ahead = run(runner, 6, num_steps=40)
    runner.execute = wait
    assert run(runner, 6, num_steps=40) == ahead


def test_pool_is_sized_to_the_memory_that_is_left(folder: Path) -> None:
    runner = make_runner(folder, num_pages=None, memory_ratio=0.5, max_running_req=256, max_seq_len=512)
    assert runner.num_pages == 256 * 32, "all requests at full length fit, and no more is taken"
