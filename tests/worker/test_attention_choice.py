"""Which attention backend a name stands for, and what is said when it cannot serve."""

import dataclasses
import importlib.util

import pytest
import torch

from minisgl.config import ATTENTION_BACKENDS
from minisgl.errors import ModelLoadError
from minisgl.requirements import ATTENTION
from minisgl_worker.attention import BACKENDS, PairedAttention, choose_auto, make_backend
from minisgl_worker.attention.base import AttentionSetup
from minisgl_worker.attention.torch_ref import TorchAttention
from minisgl_worker.kernels.dispatch import TRITON_DTYPES

SETUP = AttentionSetup(
    num_heads=4, num_kv_heads=2, head_dim=128, layer_windows=(None, None), dtype=torch.bfloat16, page_size=16,
    max_rows=8, max_seq_len=512, device=torch.device("cpu"),
)  # fmt: skip
ON_GPU = dataclasses.replace(SETUP, device=torch.device("cuda", 0))


def test_every_name_of_the_option_is_a_backend() -> None:
    assert set(BACKENDS) == set(ATTENTION) == set(ATTENTION_BACKENDS)


def test_auto_is_torch_on_a_cpu_and_in_float64_and_triton_on_a_gpu() -> None:
    assert choose_auto(SETUP) == "torch"
    assert choose_auto(ON_GPU) == "triton"
    assert choose_auto(dataclasses.replace(ON_GPU, dtype=torch.float64)) == "torch"
    assert ATTENTION["triton"].dtypes == tuple(str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES)


def test_make_backend_of_equal_names_makes_one() -> None:
    for pair in (("auto", "auto"), ("torch", "auto"), ("torch", "torch")):
        name, backend = make_backend(pair, SETUP)
        assert name == "torch" and isinstance(backend, TorchAttention) and not isinstance(backend, PairedAttention)


@pytest.mark.parametrize("name", ["triton", "fi", "fa", "trtllm"])
def test_gpu_backend_on_a_cpu_is_refused_by_name(name: str) -> None:
    for pair in ((name, "torch"), ("torch", name)):
        with pytest.raises(ModelLoadError, match=f"backend {name} needs an NVIDIA GPU, the device is cpu"):
            make_backend(pair, SETUP)


def test_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match="'fast' is not built in; there are torch, triton, fi, fa, trtllm"):
        make_backend(("fast", "torch"), SETUP)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("fi", {"dtype": torch.float32}, "fi needs dtype bfloat16 or float16, got float32"),
        ("fi", {"head_dim": 80}, "fi needs a head size of 64 or 128 or 256, got 80"),
        ("trtllm", {"page_size": 1}, "trtllm needs page_size 16 or 32 or 64 or 128, got 1"),
        ("trtllm", {"layer_windows": (None, 24)}, "trtllm has no sliding windows, the model has one of 24 tokens"),
        ("fa", {"layer_windows": (7, None)}, "fa has no sliding windows, the model has one of 7 tokens"),
        ("triton", {"dtype": torch.float64}, "triton needs dtype .*, got float64"),
    ],
)
def test_model_that_a_backend_cannot_serve_is_refused_with_the_value(name, changes, text) -> None:
    with pytest.raises(ModelLoadError, match=text):
        make_backend((name, name), dataclasses.replace(ON_GPU, **changes))


@pytest.mark.parametrize("name", ["fa", "trtllm"])
def test_gpu_of_another_generation_is_refused_with_its_capability(name: str) -> None:
    ATTENTION[name].check_capability(name, (9, 0))
    with pytest.raises(ModelLoadError, match=f"{name} needs a GPU of compute capability 9.x, this one has 10.3"):
        ATTENTION[name].check_capability(name, (10, 3))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_missing_package_is_named() -> None:
    with pytest.raises(ModelLoadError, match="the package flashinfer-python, which is not installed"):
        make_backend(("torch", "fi"), ON_GPU)
