"""Qwen3 with a mixture of experts in place of the MLP, in all layers or in those that config.json names."""

from collections.abc import Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend
from minisgl_worker.layers import Attention, GatedMLP, Place
from minisgl_worker.models.decoder import CausalLM, PreNormLayer
from minisgl_worker.moe import SparseMLP


def build_qwen3_moe(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """The dense layers' MLP has config.intermediate_size, an expert's has config.moe.intermediate_size."""
    assert config.moe is not None, "the config of a mixture of experts has no experts"
    layers = [
        PreNormLayer(
            config,
            Attention(config, i, tables[i], backend, place, qk_norm=True),
            SparseMLP(config, place) if i in config.moe.sparse_layers else GatedMLP(config, place),
            place,
        )
        for i in range(config.num_layers)
    ]
    return CausalLM(config, layers, place)
