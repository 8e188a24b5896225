"""Qwen2 and Qwen2.5: the shape of Llama, with biases on the query, key and value projections alone."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Place
from minisgl_worker.models.decoder import CausalLM, build_dense


def build_qwen2(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """The biases and the windows of the upper layers are in the config."""
    return build_dense(config, tables, backend, place, qk_norm=False)
