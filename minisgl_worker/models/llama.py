"""Llama 2 and 3, and the models that share their shape (SmolLM2, TinyLlama, ...)."""

from collections.abc import Iterator

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch
from minisgl_worker.layers import Attention, GatedMLP, Place, RMSNorm, Vocabulary, WeightSource


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the additions are fused into the norms that follow them."""

    def __init__(self, config: ModelConfig, layer: int, rotary_table: Tensor, backend: AttentionBackend, place: Place):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = Attention(config, layer, rotary_table, backend, place, qk_norm=False)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = GatedMLP(config, place)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """(branch output not yet added, residual stream), each [num_tokens, hidden_size]."""
        x, residual = self.input_norm.add(x, residual) if residual is not None else (self.input_norm(x), x)
        x, residual = self.post_norm.add(self.attention(x, batch), residual)
        return self.mlp(x), residual

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield from self.input_norm.weights(f"{name}.input_layernorm")
        yield from self.attention.weights(f"{name}.self_attn")
        yield from self.post_norm.weights(f"{name}.post_attention_layernorm")
        yield from self.mlp.weights(f"{name}.mlp")


class LlamaForCausalLM:
    """One rank's part of the model."""

    def __init__(self, config: ModelConfig, rotary_table: Tensor, backend: AttentionBackend, place: Place):
        self.embedding = Vocabulary(config.vocab_size, config.hidden_size, place)
        self.layers = [LlamaLayer(config, i, rotary_table, backend, place) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        is_tied = config.tie_word_embeddings
        self.head = self.embedding if is_tied else Vocabulary(config.vocab_size, config.hidden_size, place)

    def forward(self, tokens: Tensor, batch: ForwardBatch) -> Tensor:
        """Token ids [num_tokens] i64 -> logits of the batch's sampling rows, [num_sampling_rows, vocab_size]."""
        x, residual = self.embedding.embed(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        if (rows := batch.sampling_rows) is not None:
            x, residual = x[rows], residual[rows]
        hidden, _ = self.norm.add(x, residual)
        return self.head.logits(hidden)

    def weights(self) -> Iterator[WeightSource]:
        yield from self.embedding.weights("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{i}")
        yield from self.norm.weights("model.norm")
        if self.head is not self.embedding:
            yield from self.head.weights("lm_head")
