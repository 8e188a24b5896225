"""What one forward pass needs besides the weights (`ForwardBatch`), and what an attention backend is."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl_worker.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What a backend is made for: one rank's share of a model, its cache, and the largest batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...]  # [num_layers], None = full attention
    dtype: torch.dtype
    page_size: int
    max_rows: int  # decode rows of one batch
    max_seq_len: int
    device: torch.device
    query_pre_attn_scalar: float | None = None  # None = head_dim

    @property
    def scale(self) -> float:
        """Factor of the attention logits."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each window size of the model once."""
        return tuple(dict.fromkeys(self.layer_windows))


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a batch's decode rows, for backends that plan there. Views, good until the next step."""

    seq_lens: NDArray[np.int64]  # [num_rows], the current token included
    page_table: NDArray[np.int32]  # [num_table_rows, max_pages]
    slots: NDArray[np.int64]  # [num_rows] the table row of each


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Consecutive prompt tokens of one request."""

    first_row: int  # of its tokens in the batch
    num_tokens: int
    first_position: int  # = number of tokens of this request already in the cache
    page_ids: Tensor  # [num_pages_covered] i32 host, of positions 0, page_size, ... up to the last token of this row


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One packed batch: decode rows (one token each) first, then the prefill rows' tokens. Tensors on the device."""

    kv: KVCache
    positions: Tensor  # [num_tokens] i64
    kv_locations: Tensor  # [num_tokens] i64, page * page_size + offset: where the token's K and V go
    num_decode: int
    decode_page_table: Tensor  # [num_table_rows, max_pages] i32
    decode_seq_lens: Tensor  # [num_table_rows] i32, the current token included
    decode_slots: Tensor | None  # [num_decode] i32: the table row of each decode row; None = its own number
    prefills: tuple[PrefillRow, ...]
    sampling_rows: (
        Tensor | None
    )  # [num_sampling_rows] i64: rows to sample after, decode rows then last chunks; None = all
    host: HostRows | None = None  # of the decode rows; None inside a graph, which serves rows yet to come

    def decode_part(self) -> "ForwardBatch":
        """The decode rows alone, as attention sees them."""
        return replace(self, prefills=())

    def prefill_part(self) -> "ForwardBatch":
        """The prefill rows alone, as attention sees them: their tokens counted from 0."""
        moved = (replace(row, first_row=row.first_row - self.num_decode) for row in self.prefills)
        return replace(self, num_decode=0, prefills=tuple(moved))


class AttentionBackend(Protocol):
    """Attention over the paged cache."""

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for a batch: called once before its layers. May run on the device; must not wait for it.

        A graph captures what this launches. What the host itself has to do for a graph belongs in `plan_replay`.
        """
        ...

    def plan_replay(self, rows: HostRows) -> None:
        """Prepare for decode rows that a graph of just that many rows computes: called before its capture with rows of
        length 1, and before each replay. Must not wait for the device."""
        ...

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        """Query and result [num_tokens, num_heads, head_dim], one dtype; rows in the batch's order.

        K and V of the batch's own tokens are in the cache already.
        """
        ...
