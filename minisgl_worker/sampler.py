"""Chooses each row's next token.

Every row is first drawn by the plain rule: argmax of logit / temperature + noise (temperature 0: of the logit alone).
Rows with extras are then drawn again from the same logits with the same noise, so that an inert filter changes no token
and rows without extras pay nothing. Extras apply in this order, each to the outcome of those before:

    logit_bias -> repetition, frequency and presence penalties -> min_tokens (stop ids masked)
    -> [probabilities at the row's temperature] top_k -> top_p -> min_p -> draw

Log-probabilities are those of the model's own logits, before all of this.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.protocol import Sampling
from minisgl_worker.batch import SlotState, send_to_device
from minisgl_worker.kernels.sampling import Draw, sample


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each row that asked for k, k + 1 items: the chosen token, then the k best. On the device, rows in order."""

    token_ids: Tensor  # [num_items] i32
    values: Tensor  # [num_items] f32


class Sampler:
    """Draws for the slots of one worker; keeps the token counts of those with penalties."""

    def __init__(self, slots: SlotState, vocab_size: int, device: torch.device):
        self._slots = slots
        self._vocab_size = vocab_size
        self._device = device
        self._has_extras = np.zeros(slots.num_slots + 1, bool)
        self._counts: dict[int, _TokenCounts] = {}

    def admit(self, slot: int) -> None:
        """Take note of a slot's new request; `SlotState` holds it already."""
        sampling = self._slots.sampling[slot]
        assert sampling is not None
        self._has_extras[slot] = _has_filters(sampling) or sampling.num_logprobs is not None
        self._counts.pop(slot, None)
        if _has_penalties(sampling):
            token_ids = torch.from_numpy(self._slots.token_ids(slot).astype(np.int64)).to(self._device)
            self._counts[slot] = _TokenCounts(token_ids, int(self._slots.num_prompt_tokens[slot]), self._vocab_size)

    def has_extras(self, slots: NDArray[np.int64]) -> bool:
        """Whether a row of these slots needs more than the plain rule."""
        return bool(self._has_extras[slots].any())

    def draw(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Draw:
        """The next token of each row by the plain rule.

        Args:
            logits: [num_rows, vocab] any float dtype.
            slots: [num_rows] slot of each row.
            positions: [num_rows] number of tokens before the one that is drawn.
        """
        rows = send_to_device(slots, self._device)
        where = send_to_device(positions, self._device)
        return sample(logits, self._slots.temperature[rows], self._slots.seeds[rows], where)

    def apply_extras(
        self, logits: Tensor, tokens: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Logprobs:
        """Draw the rows with extras again, into `tokens` [num_rows] i64; other arguments as `draw`."""
        ids, values = [], []
        for row in np.flatnonzero(self._has_extras[slots]).tolist():
            slot, position = int(slots[row]), int(positions[row])
            sampling = self._slots.sampling[slot]
            assert sampling is not None
            if _has_filters(sampling):
                changed = self._change_logits(logits[row], sampling, slot, position)
                where = torch.full((1,), position, dtype=torch.int64, device=self._device)
                temperature, seeds = self._slots.temperature[slot : slot + 1], self._slots.seeds[slot : slot + 1]
                tokens[row] = sample(changed[None], temperature, seeds, where).tokens[0]
                if slot in self._counts:
                    self._counts[slot].add(tokens[row])
            if sampling.num_logprobs is not None:
                row_ids, row_values = _log_probabilities(logits[row], tokens[row], sampling.num_logprobs)
                ids.append(row_ids)
                values.append(row_values)
        if not ids:
            return Logprobs(tokens.new_empty(0, dtype=torch.int32), tokens.new_empty(0, dtype=torch.float32))
        return Logprobs(torch.cat(ids).to(torch.int32), torch.cat(values))

    def _change_logits(self, logits: Tensor, sampling: Sampling, slot: int, position: int) -> Tensor:
        """The row's logits [vocab] after everything but temperature, fp32 (fp64 for fp64); -inf where filtered out."""
        x = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        if sampling.bias_ids:
            x[self._ids(sampling.bias_ids)] += torch.from_numpy(np.frombuffer(sampling.bias_values, "<f4").copy()).to(x)
        if slot in self._counts:
            x = self._counts[slot].penalize(x, sampling)
        if position - self._slots.num_prompt_tokens[slot] < sampling.min_tokens and sampling.stop_ids:
            x[self._ids(sampling.stop_ids)] = -torch.inf
        if sampling.temperature > 0:
            x = filter_logits(x, sampling)
        return x

    def _ids(self, packed: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(packed, "<i4").astype(np.int64)).to(self._device)


class _TokenCounts:
    """Which tokens a request's prompt holds, and how often its output holds each."""

    def __init__(self, token_ids: Tensor, num_prompt_tokens: int, vocab_size: int):
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
        self._in_prompt[token_ids[:num_prompt_tokens]] = True
        self._in_output = torch.bincount(token_ids[num_prompt_tokens:], minlength=vocab_size)

    def add(self, token: Tensor) -> None:
        self._in_output[token] += 1

    def penalize(self, x: Tensor, sampling: Sampling) -> Tensor:
        """Repetition as Keskar et al. 2019 (CTRL) define it; frequency and presence as OpenAI's API does."""
        seen = self._in_prompt | (self._in_output > 0)
        factor = sampling.repetition_penalty
        x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
        return x - sampling.frequency_penalty * self._in_output - sampling.presence_penalty * (self._in_output > 0)


def filter_logits(x: Tensor, sampling: Sampling) -> Tensor:
    """Set to -inf what top_k, top_p and min_p exclude, at the row's temperature; the most likely token always stays.

    Tokens that tie with the last one kept stay too.
    """
    if 0 < sampling.top_k < len(x):
        x = x.masked_fill(x < x.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        probabilities = (x / sampling.temperature).softmax(-1)
        ordered, _ = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        num_kept = max(1, int((before < sampling.top_p).sum()))
        x = x.masked_fill(probabilities < ordered[num_kept - 1], -torch.inf)
    if sampling.min_p > 0.0:
        probabilities = (x / sampling.temperature).softmax(-1)
        x = x.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    return x


def _log_probabilities(logits: Tensor, token: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """(ids, values) [num_best + 1]: the chosen token, then the most likely ones, best first."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.to(wide).log_softmax(-1)
    best = logprobs.topk(min(num_best, len(logprobs)))
    ids = torch.cat([token[None], best.indices])
    return ids, torch.cat([logprobs[token][None], best.values]).to(torch.float32)


def _has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


def _has_filters(sampling: Sampling) -> bool:
    """Whether anything but temperature can change the row's token."""
    return bool(
        _has_penalties(sampling)
        or sampling.bias_ids
        or (sampling.min_tokens and sampling.stop_ids)
        or (sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0))
    )
