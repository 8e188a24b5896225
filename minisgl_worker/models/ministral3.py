"""Ministral 3: the shape of Mistral, with queries that are scaled by their position."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Place
from minisgl_worker.models.decoder import CausalLM, build_dense
from minisgl_worker.rotary import build_query_scale


def build_ministral3(
    config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place
) -> CausalLM:
    """The factor is 1 up to the length before scaling, and the same in all layers."""
    scale = build_query_scale(config.rope, len(tables[0]), place.dtype, place.device)
    return build_dense(config, tables, backend, place, qk_norm=False, query_scale=scale)
