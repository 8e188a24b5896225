"""Gemma 3 (text): a norm before and after each branch, scaled embeddings, windows on five layers of six."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch
from minisgl_worker.layers import Attention, GatedMLP, Place, RMSNorm, WeightSource
from minisgl_worker.models.decoder import CausalLM


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP, place: Place):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, place, config.norm_offset)

        self.input_norm, self.post_attention_norm = norm(), norm()
        self.pre_mlp_norm, self.post_mlp_norm = norm(), norm()
        self.attention, self.mlp = attention, mlp

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """See `decoder.Layer`."""
        x, residual = self.input_norm.add(x, residual) if residual is not None else (self.input_norm(x), x)
        x = self.post_attention_norm(self.attention(x, batch))
        x, residual = self.pre_mlp_norm.add(x, residual)
        return self.post_mlp_norm(self.mlp(x)), residual

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield from self.input_norm.weights(f"{name}.input_layernorm")
        yield from self.attention.weights(f"{name}.self_attn")
        yield from self.post_attention_norm.weights(f"{name}.post_attention_layernorm")
        yield from self.pre_mlp_norm.weights(f"{name}.pre_feedforward_layernorm")
        yield from self.mlp.weights(f"{name}.mlp")
        yield from self.post_mlp_norm.weights(f"{name}.post_feedforward_layernorm")


def build_gemma3(config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place) -> CausalLM:
    """Layers with a window rotate by another table than the rest; `tables` has it in their places."""
    layers = [
        Gemma3Layer(
            config, Attention(config, i, tables[i], backend, place, qk_norm=True), GatedMLP(config, place), place
        )
        for i in range(config.num_layers)
    ]
    return CausalLM(config, layers, place, embedding_scale=math.sqrt(config.hidden_size))
