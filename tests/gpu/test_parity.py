"""Logits and tokens on the card against transformers and against a CPU, for every attention backend.

Where TRITON_INTERPRET=1 is set, the same code runs on the CPU with the plain backend, which tests the tests.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl_worker.attention import BACKENDS
from minisgl_worker.cuda_graph import DecodeGraphs
from minisgl_worker.model_runner import ModelRunner
from tests.forced_logits import ForcedLogits
from tests.worker.checkpoints import reference_logits, write_checkpoint

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NAMES = ["torch"] if IS_INTERPRETED else list(BACKENDS)
MODEL = os.environ.get("MINISGL_TEST_SMOLLM2", "smollm2")  # or a path of its GGUF file
EXPECTED = Path(__file__).with_name("data") / "smollm2_greedy.json"
CLEAR_MARGIN = 0.25  # by which a token's logit has to win for rounding to bf16 not to matter
VOCAB_SIZE = 512
# The heads of a kernel that comes compiled for every backend: 2 query heads per KV head, of 128 values each.
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "initializer_range": 0.06,
}  # fmt: skip
ARCHITECTURES = ["Qwen3ForCausalLM", "LlamaForCausalLM"]
PROMPT_LENGTHS, NUM_ANSWER_TOKENS = (37, 5, 120), 40


@pytest.fixture(autouse=True)
def _needs_gpu():
    assert IS_INTERPRETED or torch.cuda.is_available(), "no NVIDIA GPU, and TRITON_INTERPRET is not 1"


def make_runner(model: str | Path, **options: object) -> ModelRunner:
    values = {"device": DEVICE, "dtype": "bfloat16", "num_pages": 256, "page_size": 16, "max_running_req": 8, **options}
    return ModelRunner(EngineConfig.from_options(model, values))


def attach_graphs(runner: ModelRunner) -> None:
    """On a CPU: the code that graphs would hold, run at each replay."""
    runner._graphs = DecodeGraphs([1, 4], runner._slots, runner.kv, runner._backend, runner._model.forward)
    with torch.inference_mode():
        runner._graphs.capture()


def make_requests() -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    return prompts, [[rng.randrange(VOCAB_SIZE) for _ in range(NUM_ANSWER_TOKENS)] for _ in prompts]


def transformers_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """[num_requests, NUM_ANSWER_TOKENS, vocab] f32 cpu."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    rows = []
    with torch.no_grad():
        for prompt, answer in zip(*make_requests(), strict=True):
            tokens = torch.tensor([[*prompt, *answer[:-1]]], device=DEVICE)
            rows.append(model(tokens).logits[0, len(prompt) - 1 :].float().cpu())
    return torch.stack(rows)


class Judge:
    """What a model's logits are, and how far off transformers in bf16 is."""

    def __init__(self, folder: Path):
        self.folder = folder
        rows = [
            reference_logits(folder, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
            for prompt, answer in zip(*make_requests(), strict=True)
        ]
        self.exact = torch.stack(rows)
        self.allowed = 2 * float((transformers_logits(folder, torch.bfloat16) - self.exact).abs().max())

    def check(self, logits: torch.Tensor) -> None:
        assert logits.shape == self.exact.shape
        error = float((logits - self.exact).abs().max())
        assert error <= self.allowed, f"largest error {error:.4f}, allowed {self.allowed:.4f}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    torch.set_num_threads(1)
    judge = Judge(write_checkpoint(tmp_path_factory.mktemp("parity") / "m", request.param, **SHAPE))
    assert 0.001 < judge.allowed < 0.1 * float(judge.exact.abs().max()), "the model is too easy or too wild to judge by"
    return judge


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_eager_steps_are_as_good_as_those_of_transformers(judge: Judge, name: str) -> None:
    runner = make_runner(judge.folder, attention_backend=name, cuda_graph_bs=[])
    forced = ForcedLogits(runner)
    for chunk in (1000, 16, 7):
        judge.check(forced.run(*make_requests(), chunk))
    assert forced.num_replays == 0


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_graphs_are_as_good_as_those_of_transformers(judge: Judge, name: str) -> None:
    """Three requests in a graph of four rows: one row is padding."""
    runner = make_runner(judge.folder, attention_backend=name, cuda_graph_bs=[1, 4])
    if IS_INTERPRETED:
        attach_graphs(runner)
    forced = ForcedLogits(runner)
    for _ in range(2):
        judge.check(forced.run(*make_requests(), 64))
    assert forced.num_replays == 2 * (NUM_ANSWER_TOKENS - 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch", "triton", "fi")])
def test_greedy_tokens_of_smollm2_are_those_of_a_cpu(name: str) -> None:
    """Real weights. After each token of the CPU's answers, the card's own choice is the same wherever it is clear."""
    rows = json.loads(EXPECTED.read_text())
    runner = make_runner(MODEL, attention_backend=name, cuda_graph_bs=[8])
    if IS_INTERPRETED:
        attach_graphs(runner)
    answers = torch.tensor([row["tokens"] for row in rows])
    logits = ForcedLogits(runner).run([row["prompt"] for row in rows], answers.tolist(), 1000)
    is_equal, is_clear = logits.argmax(dim=2) == answers, torch.tensor([row["margins"] for row in rows]) > CLEAR_MARGIN
    assert is_clear.double().mean() > 0.8
    differing = (is_clear & ~is_equal).nonzero().tolist()
    assert not differing, f"(prompt, token) where a clear winner lost: {differing}"
    assert is_equal.double().mean() >= 0.95
