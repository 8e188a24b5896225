"""Qwen3 (dense): the shape of Llama, with an RMS norm of every query and key head before the rotation."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Place
from minisgl_worker.models.decoder import CausalLM, build_dense


def build_qwen3(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """Windows of the upper layers, if any, are in the config."""
    return build_dense(config, tables, backend, place, qk_norm=True)
