"""A mixture of experts: choosing each token's experts, and computing them in one go."""

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_worker.kernels.activation import GATED_ACTIVATIONS
from minisgl_worker.kernels.dispatch import compute_dtype
from minisgl_worker.kernels.linear import linear


def router_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x [num_tokens, hidden] times the transpose of gate [num_experts, hidden], in fp32 (fp64 for fp64)."""
    if x.is_cuda and x.dtype.itemsize == 2:
        return torch.mm(x, gate.t(), out_dtype=torch.float32)  # products of 16-bit values are exact in fp32
    wide = compute_dtype(x.dtype)
    return F.linear(x.to(wide), gate.to(wide))


def route(x: Tensor, gate: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by the softmax of the router's logits, all of it in fp32 (fp64 for fp64).

    Args:
        x: [num_tokens, hidden] any float dtype.
        gate: [num_experts, hidden], x's dtype.
        normalise: whether the chosen experts' probabilities are divided by their sum.
    Returns:
        (probabilities, expert ids), each [num_tokens, num_chosen], fp32 and i64, the likeliest first.
    """
    values, ids = torch.topk(router_logits(x, gate).softmax(-1), num_chosen, dim=-1)
    return (values / values.sum(-1, keepdim=True) if normalise else values), ids


def compute_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, values: Tensor, expert_ids: Tensor, activation: str
) -> Tensor:
    """The sum over each token's experts of value * down(activation(gate(x)) * up(x)), in plain torch.

    Tokens are sorted by expert, so that each expert that somebody chose is one pair of matrix products over its tokens.

    Args:
        x: [num_tokens, hidden] any float dtype.
        gate_up: [num_experts, 2 * intermediate, hidden], gate above up.
        down: [num_experts, hidden, intermediate].
        values, expert_ids: [num_tokens, num_chosen], as `route` returns them.
        activation: a key of `GATED_ACTIVATIONS`.
    Returns:
        [num_tokens, hidden], x's dtype, summed in fp32 (fp64 for fp64).
    """
    num_tokens, num_chosen = expert_ids.shape
    order = expert_ids.flatten().argsort(stable=True)
    rows = x[order // num_chosen]
    chosen, counts = torch.unique_consecutive(expert_ids.flatten()[order], return_counts=True)
    parts = []
    for expert, part in zip(chosen.tolist(), rows.split(counts.tolist()), strict=True):
        parts.append(linear(GATED_ACTIVATIONS[activation](linear(part, gate_up[expert])), down[expert]))
    wide = compute_dtype(x.dtype)
    outs = torch.empty(len(order), x.shape[1], dtype=wide, device=x.device)
    if parts:
        outs[order] = torch.cat(parts).to(wide)
    return torch.einsum("tkh,tk->th", outs.view(num_tokens, num_chosen, x.shape[1]), values.to(wide)).to(x.dtype)
