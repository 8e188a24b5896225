"""What limits the choice of a token: top_k, then top_p, then min_p, each applied to the outcome of those before.

Where equal logits leave a choice, the lower ids stay, as the draw prefers them: top_k=1 is greedy. The most likely
token always stays.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl_worker.batch import send_to_device


@dataclass(frozen=True, slots=True)
class Filters:
    """What limits the choice of each row, on the host: [num_rows] each, one entry per row."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]  # 0 = all
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]

    def of(self, rows: NDArray[np.int64]) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def filter_logits(x: Tensor, filters: Filters) -> Tensor:
    """x [num_rows, vocab] fp32 or fp64, overwritten, with -inf for what its row's filters exclude."""
    return filter_on_cpu(x, filters) if x.device.type == "cpu" else filter_batch(x, filters)


def filter_on_cpu(x: Tensor, filters: Filters) -> Tensor:
    """`filter_batch` row by row in numpy: a row stays in the cache, and only tokens that may stay are ever sorted."""
    columns = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    for row, temperature, top_k, top_p, min_p in zip(x.numpy(), *(c.tolist() for c in columns), strict=True):
        highest = row.max()
        if not np.isfinite(highest):
            continue  # a failed row
        kept = None
        if 0 < top_k < len(row):
            kept = _most_likely(row, np.flatnonzero(row >= np.partition(row, -top_k)[-top_k]))[:top_k]
        if top_p < 1.0:
            kept = _nucleus(row, kept, temperature, top_p)
        if min_p > 0.0:
            lowest = highest + math.log(min_p) * temperature
            kept = np.flatnonzero(row >= lowest) if kept is None else kept[row[kept] >= lowest]
        if kept is not None:
            values = row[kept]
            row.fill(-np.inf)
            row[kept] = values
    return x


def _nucleus(
    row: NDArray[np.floating], kept: NDArray[np.int64] | None, temperature: float, top_p: float
) -> NDArray[np.int64]:
    """Of the tokens `kept` (None = all), in the order of their probability, the fewest that reach top_p."""
    values = row if kept is None else row[kept]
    weights = np.exp((values - values.max()) / temperature)
    total = weights.sum(dtype=np.float64)
    if kept is None:
        # Tokens below (1 - top_p) / vocab hold less than 1 - top_p together, so none of them is in the nucleus; half of
        # that leaves room for rounding.
        kept = _most_likely(row, np.flatnonzero(weights >= total * (1.0 - top_p) / (2 * len(row))))
        weights = weights[kept]
    reached = np.cumsum(weights, dtype=np.float64) / total
    return kept[: 1 + np.count_nonzero(reached < top_p)]


def _most_likely(row: NDArray[np.floating], token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ascending token ids in the order of their logits, highest first; equal ones stay in order."""
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def filter_batch(x: Tensor, filters: Filters) -> Tensor:
    """`filter_logits` for all rows at once, where the host must not wait for a value."""
    vocab = x.shape[1]
    is_limited, is_nucleus = (filters.top_k > 0) & (filters.top_k < vocab), filters.top_p < 1.0
    if len(rows := np.flatnonzero(is_limited)):
        top_k = filters.top_k[rows]
        index = send_to_device(rows, x.device)
        part = x[index]
        x[index] = _keep_first(part, part.topk(int(top_k.max())).values, send_to_device(top_k, x.device)[:, None])
    # Apart, as rows with a top_k need only so many tokens in order.
    if len(rows := np.flatnonzero(is_nucleus & is_limited)):
        index = send_to_device(rows, x.device)
        x[index] = _keep_nucleus(x[index], filters.of(rows), int(filters.top_k[rows].max()))
    if len(rows := np.flatnonzero(is_nucleus & ~is_limited)):
        index = send_to_device(rows, x.device)
        x[index] = _keep_nucleus(x[index], filters.of(rows), vocab)
    if (filters.min_p > 0.0).any():
        with np.errstate(divide="ignore"):
            distance = np.log(filters.min_p) * filters.temperature  # -inf for rows without min_p
        lowest = x.amax(1, keepdim=True) + send_to_device(distance, x.device).to(x.dtype)[:, None]
        x = x.masked_fill(x < lowest, -torch.inf)
    return x


def _keep_nucleus(x: Tensor, filters: Filters, most: int) -> Tensor:
    """x [num_rows, vocab] cut to the fewest most likely tokens that reach top_p; no row has more than `most` tokens."""
    temperature = send_to_device(filters.temperature, x.device).to(x.dtype)[:, None]
    top_p = send_to_device(filters.top_p, x.device).to(x.dtype)[:, None]
    total = (x / temperature).logsumexp(1, keepdim=True)
    ordered = x.topk(most).values
    probabilities = (ordered / temperature - total).exp()
    before = probabilities.cumsum(1) - probabilities
    return _keep_first(x, ordered, (before < top_p).sum(1, keepdim=True).clamp(min=1))


def _keep_first(x: Tensor, ordered: Tensor, num_kept: Tensor) -> Tensor:
    """x [num_rows, vocab] cut to each row's num_kept [num_rows, 1] largest values, the lower ids first where they tie.

    Args:
        ordered: [num_rows, n] the largest values of each row in descending order; n >= num_kept.
    """
    cut = ordered.gather(1, num_kept - 1)
    is_above, is_tied = x > cut, x == cut
    num_tied = num_kept - is_above.sum(1, keepdim=True)
    return x.masked_fill(~(is_above | (is_tied & (is_tied.cumsum(1) <= num_tied))), -torch.inf)
