"""Building blocks of the models: each holds its rank's part of the weights and says where in a checkpoint they are.

Plain classes, not `nn.Module`: nothing here is trained, and a step calls some 200 of them. Where a docstring says no
dtype or device, a tensor has those of the layer's `Place`: the model's dtype, on the rank's device.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.model_folder import ModelConfig
from minisgl.sharding import divide_model
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch
from minisgl_worker.kernels.activation import GATED_ACTIVATIONS
from minisgl_worker.kernels.linear import linear
from minisgl_worker.kernels.norm import add_rms_norm, rms_norm
from minisgl_worker.kernels.rope_append import qk_norm_rope_append
from minisgl_worker.parallel import ParallelGroup
from minisgl_worker.vocabulary import SharedVocabulary


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where one piece of memory gets its values: a slice of a tensor of the checkpoint.

    The slice is rows (dim 0) or columns (dim 1) `start` to `start + length`; rows of the target past it stay as is.
    """

    name: str  # of the checkpoint's tensor, as transformers names it
    target: Tensor  # a view of the fused, sharded place
    full_shape: tuple[int, ...]  # the whole tensor in the checkpoint
    dim: int = 0
    start: int = 0
    length: int | None = None  # None = all
    offset: float = 0.0  # added to the values, in the dtype of the target


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's weights live: the ranks, the dtype and the device; and what computes mixtures of experts."""

    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    moe_backend: str = "auto"

    def empty(self, *shape: int) -> Tensor:
        """[*shape] of `dtype` on `device`, not initialised."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """[*shape] of `dtype` on `device`."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def full(self, value: float) -> Tensor:
        """A scalar, [] of `dtype` on `device`."""
        return torch.tensor(value, dtype=self.dtype, device=self.device)


class RMSNorm:
    """Root-mean-square normalisation with a weight; whole on every rank.

    Attributes:
        weight: [size]; fp32 where an offset is added, unless the model is fp64.
    """

    def __init__(self, size: int, eps: float, place: Place, offset: float = 0.0):
        """
        Args:
            offset: added to the checkpoint's weight. If it is not 0, the sum is fp32 and what it scales is not rounded.
        """
        self.weight = place.empty(size)
        if offset and place.dtype != torch.float64:
            self.weight = self.weight.float()
        self.eps, self._offset = eps, offset

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [num_tokens, size] as x and residual are."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield WeightSource(f"{name}.weight", self.weight, (self.weight.shape[0],), offset=self._offset)


class ColumnLinear:
    """Several projections of one input, fused: each rank holds a share of each one's outputs.

    Attributes:
        weight: [sum of this rank's output sizes, in_size]; bias [that sum], or None.
    """

    def __init__(self, in_size: int, out_sizes: dict[str, tuple[int, int, int]], bias: bool, place: Place):
        """
        Args:
            out_sizes: name in the checkpoint -> (whole output size, first row of this rank, rows of this rank).
        """
        self._parts = out_sizes
        rows = sum(length for _, _, length in out_sizes.values())
        self.weight = place.empty(rows, in_size)
        self.bias = place.empty(rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_size] -> [num_tokens, sum of this rank's output sizes]."""
        return linear(x, self.weight, self.bias)

    def weights(self, name: str) -> Iterator[WeightSource]:
        row, in_size = 0, self.weight.shape[1]
        for part, (whole, start, length) in self._parts.items():
            rows = slice(row, row + length)
            yield WeightSource(f"{name}.{part}.weight", self.weight[rows], (whole, in_size), 0, start, length)
            if self.bias is not None:
                yield WeightSource(f"{name}.{part}.bias", self.bias[rows], (whole,), 0, start, length)
            row += length


class RowLinear:
    """A projection whose input is shared among the ranks; their partial products are summed, the bias added once.

    Attributes:
        weight: [out_size, length]; bias [out_size], or None.
    """

    def __init__(self, in_size: int, first: int, length: int, out_size: int, bias: bool, place: Place):
        self._in_size, self._first, self._length = in_size, first, length
        self.weight = place.empty(out_size, length)
        self.bias = place.empty(out_size) if bias else None
        self._group = place.group

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's [num_tokens, length] -> the sum of all ranks' products, [num_tokens, out_size]."""
        return self._group.sum(linear(x, self.weight, self.bias if self._group.rank == 0 else None))

    def weights(self, name: str) -> Iterator[WeightSource]:
        out_size = self.weight.shape[0]
        yield WeightSource(f"{name}.weight", self.weight, (out_size, self._in_size), 1, self._first, self._length)
        if self.bias is not None:
            yield WeightSource(f"{name}.bias", self.bias, (out_size,))


class Vocabulary:
    """The embedding, or the output head, with the vocabulary shared among the ranks in equal, zero-padded parts.

    Attributes:
        weight: [rows of the part, hidden_size].
    """

    def __init__(self, vocab_size: int, hidden_size: int, place: Place):
        self._group = place.group
        self._shared = SharedVocabulary(vocab_size, place.group)
        self.weight = place.zeros(self._shared.num_rows, hidden_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [num_tokens] i64 -> [num_tokens, hidden_size]."""
        if self._group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self._shared.first_token_id
        foreign = (local < 0) | (local >= self._shared.num_rows)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(-1), 0)
        return self._group.sum(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> logits of this rank's part, [num_rows, rows of the part]; -inf at padding."""
        return self._shared.mask_padding(linear(hidden, self.weight))

    def weights(self, name: str) -> Iterator[WeightSource]:
        shared, full = self._shared, (self._shared.size, self.weight.shape[1])
        target = self.weight[: shared.num_tokens]
        yield WeightSource(f"{name}.weight", target, full, 0, shared.first_token_id, shared.num_tokens)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, place: Place):
        size, hidden = config.intermediate_size, config.hidden_size
        share = divide_model(config, place.group.size).intermediate_size
        first = place.group.rank * share
        parts = dict.fromkeys(("gate_proj", "up_proj"), (size, first, share))
        self.gate_up = ColumnLinear(hidden, parts, config.mlp_bias, place)
        self.down = RowLinear(size, first, share, hidden, config.mlp_bias, place)
        self._activate_mul = GATED_ACTIVATIONS[config.hidden_act]

    def __call__(self, x: Tensor) -> Tensor:
        """x and result [num_tokens, hidden_size]."""
        return self.down(self._activate_mul(self.gate_up(x)))

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield from self.gate_up.weights(name)
        yield from self.down.weights(f"{name}.down_proj")


class Attention:
    """Self-attention over the paged cache, with an optional RMS norm of each query and key head before the rotation."""

    def __init__(self, config: ModelConfig, layer: int, rotary_table: Tensor, backend: AttentionBackend,
                 place: Place, *, qk_norm: bool, query_scale: Tensor | None = None):  # fmt: skip
        """
        Args:
            query_scale: factor of the query at each position, [num_positions] in the model's dtype; None = 1.
        """
        group, size = place.group, config.head_dim
        self.layer, self._backend, self._rotary_table = layer, backend, rotary_table
        sizes = divide_model(config, group.size)
        num_heads = sizes.num_heads
        first = group.rank * num_heads * size
        first_kv_head = group.rank * config.num_kv_heads // group.size  # neighbours' own, where they hold the same
        kv_part = (config.num_kv_heads * size, first_kv_head * size, sizes.num_kv_heads * size)
        parts = {"q_proj": (config.num_heads * size, first, num_heads * size), "k_proj": kv_part, "v_proj": kv_part}
        self.qkv = ColumnLinear(config.hidden_size, parts, config.attention_bias, place)
        self.output = RowLinear(
            config.num_heads * size, first, num_heads * size, config.hidden_size, config.output_bias, place
        )
        self.q_norm = RMSNorm(size, config.rms_norm_eps, place, config.norm_offset) if qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps, place, config.norm_offset) if qk_norm else None
        self._eps, self._query_scale = config.rms_norm_eps, query_scale

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x and result [num_tokens, hidden_size]; K and V of these tokens are written to the cache."""
        k_cache, v_cache = batch.kv.layer(self.layer)
        query = qk_norm_rope_append(
            self.qkv(x),
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self._eps,
            self._rotary_table,
            batch.positions,
            k_cache,
            v_cache,
            batch.kv_locations,
        )
        if self._query_scale is not None:
            query = query * self._query_scale[batch.positions, None, None]
        return self.output(self._backend.attend(query, self.layer, batch).flatten(1))

    def weights(self, name: str) -> Iterator[WeightSource]:
        yield from self.qkv.weights(name)
        yield from self.output.weights(f"{name}.o_proj")
        if self.q_norm and self.k_norm:
            yield from self.q_norm.weights(f"{name}.q_norm")
            yield from self.k_norm.weights(f"{name}.k_norm")
