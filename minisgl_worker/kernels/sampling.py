"""Choosing one token per row of logits: temperature, then argmax under Gumbel noise, in one pass over the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_worker.kernels.dispatch import use_triton
from minisgl_worker.kernels.noise import HostNoise, gumbel, row_keys, split_seeds


@dataclass(frozen=True, slots=True)
class Draw:
    """The choice of each row.

    With a vocabulary split over ranks, each rank draws from its part and `combine_draws` chooses among the ranks.
    """

    tokens: Tensor  # [num_rows] i64: always a valid id
    scores: Tensor  # [num_rows] fp32: what the chosen token won with; NaN: a NaN or +inf; -inf: no token can win
    failed: Tensor  # [num_rows] bool: the row holds NaN or +inf, or no finite logit


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token_id: int = 0) -> Draw:
    """Draw one token per row: argmax of logit / temperature + noise, the lowest id on ties.

    Args:
        logits: [num_rows, vocab] bf16, fp16 or fp32 (or fp64 on the CPU); the math is fp32.
        temperature: [num_rows] fp32; 0 = no noise, the highest logit.
        seeds: [num_rows] i64, the bits of the request's u64 seed.
        positions: [num_rows] i32 or i64, number of tokens before the one that is drawn.
        first_token_id: id of the first column, where the logits are a part of the vocabulary.
    """
    if use_triton(logits):
        from minisgl_worker.kernels import sampling_triton  # Triton is absent where there is no GPU

        return sampling_triton.sample(logits, temperature, seeds, positions, first_token_id)
    if logits.device.type == "cpu":
        return sample_on_cpu(logits, temperature, seeds, positions, first_token_id)
    return sample_reference(logits, temperature, seeds, positions, first_token_id)


def combine_draws(tokens: Tensor, scores: Tensor) -> Draw:
    """The draw from the whole vocabulary, given those from its parts.

    Args:
        tokens, scores: [num_parts, num_rows] i64 and fp32 of the parts' draws, in ascending order of their token ids.
    """
    best = scores.argmax(dim=0, keepdim=True)  # to which NaN is the highest
    score = scores.gather(0, best)[0]
    return Draw(tokens.gather(0, best)[0], score, ~score.isfinite())


def sample_reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token_id: int = 0
) -> Draw:
    """`sample` in plain torch. Rows are handled one by one: one row and its noise stay in the cache."""
    highest, tokens = logits.max(dim=-1)
    scores = highest.to(torch.float32)
    failed = ~scores.isfinite()
    drawn = torch.nonzero(temperature > 0)[:, 0].tolist()
    if drawn:
        columns = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device) + first_token_id
        k0, k1 = row_keys(*split_seeds(seeds), positions)
        for row in drawn:
            noisy = gumbel(k0[row], k1[row], columns)
            noisy.add_(logits[row].to(torch.float32) / temperature[row])
            scores[row], tokens[row] = noisy.max(dim=-1)
    scores.masked_fill_(failed & (scores != -torch.inf), torch.nan)
    return Draw(tokens + first_token_id, scores, failed)


def sample_on_cpu(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token_id: int = 0
) -> Draw:
    """`sample_reference` in half its time: buffers that stay in the cache, and the noise by `HostNoise`."""
    highest, tokens = logits.max(dim=-1)
    scores = highest.to(torch.float32)
    failed = ~scores.isfinite()
    drawn = torch.nonzero(temperature > 0)[:, 0].tolist()
    if drawn:
        k0, k1 = (keys.tolist() for keys in row_keys(*split_seeds(seeds), positions))
        noise = HostNoise(logits.shape[1], first_token_id)
        noisy = torch.empty(logits.shape[1], dtype=torch.float32)
        for row in drawn:
            noisy.copy_(logits[row]).div_(temperature[row]).add_(noise.draw(k0[row], k1[row]))
            tokens[row] = best = int(noisy.numpy().argmax())
            scores[row] = noisy[best]
    scores.masked_fill_(failed & (scores != -torch.inf), torch.nan)
    return Draw(tokens + first_token_id, scores, failed)
