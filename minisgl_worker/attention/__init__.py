"""The attention backends, by name."""

import torch

from minisgl.config import EngineConfig
from minisgl.errors import ModelLoadError
from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.attention.torch_ref import TorchAttention

BACKENDS = {"torch": TorchAttention}


def make_backend(config: EngineConfig, model: ModelConfig, device: torch.device) -> tuple[str, AttentionBackend]:
    """The (name, backend) that the configuration asks for; "auto" is the measured best for the device.

    Raises:
        ModelLoadError: the backend is not available; names those that are.
    """
    prefill, decode = (name if name != "auto" else "torch" for name in config.attention_pair())
    for name in (prefill, decode):
        if name not in BACKENDS:
            raise ModelLoadError(f"attention backend {name!r} is not available on {device}; available: {list(BACKENDS)}")
    if prefill != decode:
        raise ModelLoadError(f"attention backends {prefill},{decode} cannot be paired")
    return prefill, BACKENDS[prefill](model)
