"""Mistral, and the text part of Mistral 3: the shape of Llama, with a sliding window on every layer or on none."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Place
from minisgl_worker.models.decoder import CausalLM, build_dense


def build_mistral(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """The window is in the config; attention alone knows of it."""
    return build_dense(config, tables, backend, place, qk_norm=False)
