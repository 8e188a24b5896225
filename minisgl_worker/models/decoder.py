"""What the families share: a stack of layers between an embedding and a head, and the layer that most of them have."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch
from minisgl_worker.layers import Attention, GatedMLP, Place, RMSNorm, Vocabulary, WeightSource


class Layer(Protocol):
    """One layer. Each addition to the residual stream is left to the norm that follows it, which fuses the two."""

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """x is what the layer before has not yet added; -> the same of this layer.

        Args:
            x: [num_tokens, hidden_size] of the model's dtype, on the rank's device, as all the others.
            residual: what has been added up before x; None for the first layer, whose x is the embedding.
        """
        ...

    def weights(self, name: str) -> Iterator[WeightSource]: ...


class MLP(Protocol):
    """The part of a layer that looks at each token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [num_tokens, hidden_size] of the model's dtype, on the rank's device; x is not changed."""
        ...

    def weights(self, name: str) -> Iterator[WeightSource]: ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: MLP, place: Place):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = mlp

    def __call__(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """See `Layer`."""
        x, residual = self.input_norm.add(x, residual) if residual is not None else (self.input_norm(x), x)
        x, residual = self.post_norm.add(self.attention(x, batch), residual)
        return self.mlp(x), residual

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield from self.input_norm.weights(f"{name}.input_layernorm")
        yield from self.attention.weights(f"{name}.self_attn")
        yield from self.post_norm.weights(f"{name}.post_attention_layernorm")
        yield from self.mlp.weights(f"{name}.mlp")


class CausalLM:
    """One rank's part of a model."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[Layer], place: Place, embedding_scale: float | None = None
    ):
        """
        Args:
            embedding_scale: factor of the embeddings, rounded to the model's dtype; None = 1.
        """
        self.embedding = Vocabulary(config.vocab_size, config.hidden_size, place)
        self.layers = layers
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place, config.norm_offset)
        is_tied = config.tie_word_embeddings
        self.head = self.embedding if is_tied else Vocabulary(config.vocab_size, config.hidden_size, place)
        self._scale = None if embedding_scale is None else place.full(embedding_scale)

    def forward(self, tokens: Tensor, batch: ForwardBatch) -> Tensor:
        """Token ids [num_tokens] i64 -> logits of the batch's sampling rows, of the model's dtype.

        Returns:
            [num_sampling_rows, rows of this rank's part of the vocabulary]; -inf at the part's padding.
        """
        x, residual = self.embedding.embed(tokens), None
        if self._scale is not None:
            x = x * self._scale
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        if (rows := batch.sampling_rows) is not None:
            x, residual = x[rows], residual[rows]
        hidden, _ = self.norm.add(x, residual)
        return self.head.logits(hidden)

    def weights(self) -> Iterator[WeightSource]:
        """Every weight of this rank, by the names that transformers' text models have in their files."""
        yield from self.embedding.weights("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            yield from layer.weights(f"model.layers.{i}")
        yield from self.norm.weights("model.norm")
        if self.head is not self.embedding:
            yield from self.head.weights("lm_head")


# (config, each layer's rotary table [num_positions, head_dim] fp32, attention backend, place) -> model
Build = Callable[[ModelConfig, Sequence[Tensor], AttentionBackend, Place], CausalLM]


def build_dense(
    config: ModelConfig, tables: Sequence[Tensor], backend: AttentionBackend, place: Place, *, qk_norm: bool,
    query_scale: Tensor | None = None,
) -> CausalLM:  # fmt: skip
    """A model of pre-norm layers with gated MLPs.

    Args:
        qk_norm: whether each head of q and k is normalised before the rotation.
        query_scale: see `Attention`.
    """
    layers = [
        PreNormLayer(
            config,
            Attention(config, i, tables[i], backend, place, qk_norm=qk_norm, query_scale=query_scale),
            GatedMLP(config, place),
            place,
        )
        for i in range(config.num_layers)
    ]
    return CausalLM(config, layers, place)
