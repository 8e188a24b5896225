"""The grouped kernels of a mixture of experts against their plain twin, compiled or interpreted."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from minisgl_worker.kernels import moe_triton
from minisgl_worker.kernels.moe import compute_experts, route

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter's bf16 is approximate, its fp16 exact.
DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.fixture(autouse=True)
def device():
    """Makes the tests' device the default one; a GPU lane without a GPU fails."""
    assert IS_INTERPRETED or torch.cuda.is_available(), "no NVIDIA GPU, and TRITON_INTERPRET is not 1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("cpu" if IS_INTERPRETED else "cuda") as chosen:
        yield chosen


class Experts:
    """Random weights of experts, and both ways to compute them."""

    def __init__(self, num_experts: int, hidden: int, width: int, dtype: torch.dtype):
        self.gate_up = (torch.randn(num_experts, 2 * width, hidden) * hidden**-0.5).to(dtype)
        self.down = (torch.randn(num_experts, hidden, width) * width**-0.5).to(dtype)
        self.counts = torch.zeros(num_experts, dtype=torch.int32)

    def check(self, x, logits, num_chosen, normalise=True, activation="silu", tolerance=6e-3):
        """The result, after it was found equal to the twin's and the scratch memory left clean."""
        arguments = (x, logits, self.gate_up, self.down, num_chosen, normalise, activation, self.counts)
        got = moe_triton.sparse_mlp(*arguments)
        values, ids = torch.topk(logits.softmax(-1), num_chosen, dim=-1)
        if normalise:
            values = values / values.sum(-1, keepdim=True)
        want = compute_experts(x, self.gate_up, self.down, values, ids, activation)
        assert got.shape == want.shape and got.dtype == want.dtype
        error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
        assert error <= tolerance, f"relative error {error:.2e}"
        assert not self.counts.any()
        return got


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (5, 3), (16, 1), (6, 6)])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_sparse_mlp_equals_its_plain_twin(num_tokens, num_experts, num_chosen):
    experts = Experts(num_experts, 72, 40, DTYPE)
    x, logits = torch.randn(num_tokens, 72, dtype=DTYPE), torch.randn(num_tokens, num_experts)
    for normalise in (True, False):
        experts.check(x, logits, num_chosen, normalise)


def test_sparse_mlp_of_fp32_and_gelu_equals_its_plain_twin():
    experts = Experts(4, 48, 24, torch.float32)
    x, logits = torch.randn(9, 48), torch.randn(9, 4)
    experts.check(x, logits, 2, activation="gelu_pytorch_tanh", tolerance=1e-5)


@pytest.mark.parametrize("num_tokens", [50, 150])
def test_sparse_mlp_of_one_popular_expert_equals_its_plain_twin(num_tokens):
    """All tokens choose one expert: several tiles of it, and most others have none."""
    experts = Experts(8, 64, 32, DTYPE)
    x, logits = torch.randn(num_tokens, 64, dtype=DTYPE), torch.randn(num_tokens, 8)
    logits[:, 5] += 20
    experts.check(x, logits, 2)


def test_sparse_mlp_is_the_same_for_a_token_alone_and_repeats_bit_by_bit():
    """The order in which tokens reach an expert does not show in the result."""
    experts = Experts(8, 64, 32, DTYPE)
    x, logits = torch.randn(12, 64, dtype=DTYPE), torch.randn(12, 8)
    first = experts.check(x, logits, 2)
    assert torch.equal(first, experts.check(x, logits, 2))
    assert torch.equal(first.flip(0), experts.check(x.flip(0), logits.flip(0), 2))


def test_sparse_mlp_of_no_tokens_is_empty():
    experts = Experts(4, 16, 16, DTYPE)
    assert experts.check(torch.zeros(0, 16, dtype=DTYPE), torch.zeros(0, 4), 2).shape == (0, 16)


def test_broken_row_stays_alone():
    experts = Experts(5, 64, 32, DTYPE)
    x, logits = torch.randn(6, 64, dtype=DTYPE), torch.randn(6, 5)
    arguments = (experts.gate_up, experts.down, 2, True, "silu", experts.counts)
    whole = moe_triton.sparse_mlp(x, logits, *arguments)
    x[3], logits[3] = float("nan"), float("nan")
    broken = moe_triton.sparse_mlp(x, logits, *arguments)
    assert broken[3].isnan().any()
    rest = [0, 1, 2, 4, 5]
    assert torch.equal(broken[rest], whole[rest])


@pytest.mark.skipif(IS_INTERPRETED, reason="the size of a real layer")
@pytest.mark.parametrize("num_tokens", [1, 16, 256, 3000])
def test_sparse_mlp_of_a_real_layer_equals_its_plain_twin(num_tokens):
    """The shapes of Qwen3-30B-A3B, routed as its router would."""
    experts = Experts(128, 2048, 768, DTYPE)
    x, gate = torch.randn(num_tokens, 2048, dtype=DTYPE), torch.randn(128, 2048, dtype=DTYPE) * 0.02
    values, ids = route(x, gate, 8, normalise=True)
    logits = torch.mm(x, gate.t(), out_dtype=torch.float32)
    assert values.shape == ids.shape == (num_tokens, 8)
    experts.check(x, logits, 8)
