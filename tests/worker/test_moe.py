"""The plain path of a mixture of experts, and the choice of a backend."""

from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.model_folder import resolve_model
from minisgl_worker.kernels.moe import compute_experts, route
from minisgl_worker.layers import Place
from minisgl_worker.model_runner import ModelRunner
from minisgl_worker.moe import SparseMLP, choose_moe_backend
from minisgl_worker.parallel import ParallelGroup
from minisgl_worker.weights import load_weights
from tests.worker.checkpoints import write_checkpoint


def test_compute_experts_equals_a_loop_over_tokens_and_their_experts() -> None:
    torch.manual_seed(0)
    x, gate_up, down = (torch.randn(*shape, dtype=torch.float64) for shape in ((7, 6), (5, 8, 6), (5, 6, 4)))
    values, ids = route(x, torch.randn(5, 6, dtype=torch.float64), 3, normalise=False)
    got = compute_experts(x, gate_up, down, values, ids, "silu")
    for token in range(7):
        want = torch.zeros(6, dtype=torch.float64)
        for value, expert in zip(values[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            want += value * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        assert (got[token] - want).abs().max() < 1e-12


def test_compute_experts_reads_no_expert_that_nobody_chose() -> None:
    gate_up, down = torch.ones(6, 4, 3), torch.ones(6, 3, 2)
    gate_up[[0, 2, 5]] = down[[0, 2, 5]] = float("nan")
    ids = torch.tensor([[1, 3], [4, 1]])
    out = compute_experts(torch.ones(2, 3), gate_up, down, torch.full((2, 2), 0.5), ids, "silu")
    assert out.isfinite().all()
    assert compute_experts(torch.ones(0, 3), gate_up, down, torch.ones(0, 2), ids[:0], "silu").shape == (0, 3)


@pytest.mark.parametrize("normalise", [False, True])
def test_route_is_in_fp32_whatever_the_dtype(normalise: bool) -> None:
    torch.manual_seed(1)
    x, gate = torch.randn(40, 64, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)
    values, ids = route(x, gate, 4, normalise)
    best = (x.double() @ gate.double().T).softmax(-1).topk(4)
    want = best.values / best.values.sum(-1, keepdim=True) if normalise else best.values
    assert values.dtype == torch.float32 and torch.equal(ids, best.indices)
    assert (values - want).abs().max() < 1e-5


def place(name: str) -> Place:
    return Place(ParallelGroup(0, 1), torch.float32, torch.device("cpu"), name)


def test_backend_of_experts_is_chosen_or_refused_by_name(tmp_path: Path) -> None:
    assert choose_moe_backend(place("auto")) == choose_moe_backend(place("torch")) == "torch"
    with pytest.raises(ModelLoadError, match="moe_backend triton needs an NVIDIA GPU, the device is cpu"):
        choose_moe_backend(place("triton"))
    folder = write_checkpoint(tmp_path / "m", "Qwen3MoeForCausalLM")
    config = EngineConfig.from_options(folder, {"device": "cpu", "num_pages": 4, "moe_backend": "triton"})
    with pytest.raises(ModelLoadError, match="moe_backend triton needs an NVIDIA GPU"):
        ModelRunner(config)


class Alone(ParallelGroup):
    """A rank whose sum is its own part."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_shares_of_two_ranks_sum_to_the_whole(tmp_path: Path) -> None:
    model = resolve_model(str(write_checkpoint(tmp_path / "m", "Qwen3MoeForCausalLM")))

    def layer(rank: int, size: int) -> SparseMLP:
        made = SparseMLP(model.config, Place(Alone(rank, size), torch.float32, torch.device("cpu")))
        load_weights(made.weights("model.layers.1.mlp"), model)
        return made

    x = torch.randn(9, 32)
    parts = [layer(rank, 2)(x) for rank in range(2)]
    assert parts[0].abs().max() > 0.01
    assert (parts[0] + parts[1] - layer(0, 1)(x)).abs().max() < 1e-5
