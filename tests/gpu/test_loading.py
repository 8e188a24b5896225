"""Loading onto a GPU: every way of conversion and slicing gives what it gives on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.checkpoint import expected_tensors
from minisgl.json_file import JsonFile
from minisgl.model_config import read_config
from minisgl.model_folder import ModelFolder, resolve_model
from minisgl_worker import weights
from minisgl_worker.layers import WeightSource

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFolder:
    assert torch.cuda.is_available(), "no NVIDIA GPU"
    torch.manual_seed(0)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = expected_tensors(read_config(JsonFile(tmp_path / "config.json")))
    save_file({n: torch.randn(s).to(request.param) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    return resolve_model(str(tmp_path))


def load(model: ModelFolder, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every tensor whole, and of matrices the second half of the rows and of the columns, plus 1."""
    sources = []
    for name, tensor in model.tensors.items():
        shape = tensor.shape
        sources.append(WeightSource(name, torch.zeros(shape, dtype=dtype, device=device), shape))
        if len(shape) == 2:
            rows, columns = shape[0] // 2, shape[1] // 2
            half = torch.zeros(rows, shape[1], dtype=dtype, device=device)
            sources.append(WeightSource(name, half, shape, 0, shape[0] - rows, rows, offset=1.0))
            half = torch.zeros(shape[0], columns, dtype=dtype, device=device)
            sources.append(WeightSource(name, half, shape, 1, shape[1] - columns, columns, offset=1.0))
    weights.load_weights(sources, model)
    return [source.target.cpu() for source in sources]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_bytes", [1, 1000, 2**24])
def test_loading_onto_a_gpu_equals_loading_on_the_cpu(
    model: ModelFolder, dtype: torch.dtype, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BUFFER_BYTES", buffer_bytes)
    for got, want in zip(load(model, "cuda", dtype), load(model, "cpu", dtype), strict=True):
        assert torch.equal(got, want)
