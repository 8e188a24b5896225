"""Llama 2 and 3, and the models that share their shape (SmolLM2, TinyLlama, ...)."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Place
from minisgl_worker.models.decoder import CausalLM, build_dense


def build_llama(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """Biases as config.json says, on all projections."""
    return build_dense(config, tables, backend, place, qk_norm=False)
