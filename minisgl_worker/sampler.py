"""Chooses each row's next token.

Every row is first drawn by the plain rule: argmax of logit / temperature + noise (temperature 0: of the logit alone).
Rows with extras are then drawn again from the same logits with the same noise, so that an inert filter changes no token
and rows without extras pay nothing. Extras apply in this order, each to the outcome of those before:

    logit_bias -> repetition, frequency and presence penalties -> min_tokens (stop ids masked)
    -> [probabilities at the row's temperature] top_k -> top_p -> min_p -> draw

Where equal logits leave a choice, `top_k` and `top_p` keep the lower ids, as the draw does: top_k=1 is greedy.

Log-probabilities are those of the model's own logits, before all of this.

With a vocabulary shared among ranks, the plain rule exchanges each rank's best token. Rows with extras or
log-probabilities collect their logits, a whole vocabulary per row on every rank, and all ranks compute the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.protocol import Sampling
from minisgl_worker.batch import SlotState, send_to_device
from minisgl_worker.filters import Filters, filter_logits
from minisgl_worker.kernels.dispatch import compute_dtype
from minisgl_worker.kernels.sampling import Draw, sample
from minisgl_worker.parallel import ParallelGroup
from minisgl_worker.vocabulary import SharedVocabulary

# Rows with extras that are handled together, which bounds the memory. The host launches every operation for each group,
# and the device waits for it: 256 rows with top_k take 6.8 ms in groups of 32 and 4.4 in groups of 64 (H200).
ROWS_AT_ONCE = 64
EXTRAS_BYTES_PER_LOGIT = 66  # of that memory: fp32 copies, a sort with its ids (top_p: 65 measured), masks


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each row that asked for k, k + 1 items: the chosen token, then the k best. On the device, rows in order."""

    token_ids: Tensor  # [num_items] i32
    values: Tensor  # [num_items] f32


class Sampler:
    """Draws for the slots of one worker; keeps the token counts of those with penalties."""

    def __init__(self, slots: SlotState, vocab_size: int, device: torch.device, group: ParallelGroup | None = None):
        self._slots = slots
        self._device = device
        self.vocabulary = SharedVocabulary(vocab_size, group or ParallelGroup())
        num_slots = slots.num_slots + 1
        self._is_redrawn = np.zeros(num_slots, bool)
        self._num_logprobs = np.full(num_slots, -1, np.int64)  # -1 = none asked for
        ones, zeros = np.ones(num_slots), np.zeros(num_slots)
        self._filters = Filters(ones.astype(np.float32), np.zeros(num_slots, np.int64), ones.copy(), zeros)
        self._penalties = _Penalties(num_slots, vocab_size, device)

    def admit(self, slot: int) -> None:
        """Take note of a slot's new request; `SlotState` holds it already."""
        sampling = self._slots.sampling[slot]
        assert sampling is not None
        self._num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        is_drawn = sampling.temperature > 0  # what keeps the most likely token keeps a greedy one
        self._filters.temperature[slot] = sampling.temperature if is_drawn else 1.0
        self._filters.top_k[slot] = sampling.top_k if is_drawn else 0
        self._filters.top_p[slot] = sampling.top_p if is_drawn else 1.0
        self._filters.min_p[slot] = sampling.min_p if is_drawn else 0.0
        is_filtered = is_drawn and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
        is_masked = sampling.min_tokens > 0 and bool(sampling.stop_ids)
        num_prompt = int(self._slots.num_prompt_tokens[slot])
        is_penalized = self._penalties.admit(slot, sampling, self._slots.token_ids(slot), num_prompt)
        self._is_redrawn[slot] = is_filtered or is_masked or is_penalized or bool(sampling.bias_ids)

    def has_extras(self, slots: NDArray[np.int64]) -> bool:
        """Whether a row of these slots needs more than the plain rule."""
        return bool((self._is_redrawn[slots] | (self._num_logprobs[slots] >= 0)).any())

    def draw(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Draw:
        """The next token of each row by the plain rule; without noise where `apply_extras` draws again.

        Args:
            logits: [num_rows, vocab] any float dtype; of this rank's part of the vocabulary.
            slots: [num_rows] slot of each row.
            positions: [num_rows] number of tokens before the one that is drawn.
        """
        return self._draw(self.vocabulary.draw, logits, slots, positions, self._is_redrawn[slots])

    def apply_extras(
        self, logits: Tensor, tokens: Tensor, failed: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Logprobs:
        """Draw the rows with extras again, into `tokens` [num_rows] i64 and `failed` [num_rows] bool.

        A row also fails when nothing is left to choose from. Other arguments as `draw`.
        """
        for rows in _split_rows(np.flatnonzero(self._is_redrawn[slots])):
            index = send_to_device(rows, self._device)
            x = self.vocabulary.gather_logits(logits[index]).to(compute_dtype(logits.dtype))
            x = self._change_logits(x, slots[rows], positions[rows])
            draw = self._draw(sample, x, slots[rows], positions[rows], np.zeros(len(rows), bool))
            tokens[index] = draw.tokens
            failed[index] |= draw.failed
            self._penalties.count(slots[rows], draw.tokens)
        wanted = np.flatnonzero(self._num_logprobs[slots] >= 0)
        parts = [
            _log_probabilities(
                self.vocabulary.gather_logits(logits[send_to_device(rows, self._device)]),
                tokens[send_to_device(rows, self._device)],
                self._num_logprobs[slots[rows]],
            )
            for rows in _split_rows(wanted)
        ]
        if not parts:
            return Logprobs(tokens.new_empty(0, dtype=torch.int32), tokens.new_empty(0, dtype=torch.float32))
        return Logprobs(torch.cat([part.token_ids for part in parts]), torch.cat([part.values for part in parts]))

    def _draw(
        self,
        rule: Callable[[Tensor, Tensor, Tensor, Tensor], Draw],
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        is_quiet: NDArray[np.bool_],
    ) -> Draw:
        """By `rule`, which is `sample` or the shared vocabulary's. `is_quiet` [num_rows]: without noise."""
        where = send_to_device(slots, self._device)
        temperature = self._slots.temperature[where]
        if is_quiet.any():
            temperature = temperature.masked_fill(send_to_device(is_quiet, self._device), 0.0)
        return rule(logits, temperature, self._slots.seeds[where], send_to_device(positions, self._device))

    def _change_logits(self, x: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """x [num_rows, vocab], which is overwritten, after everything but temperature; -inf where filtered out."""
        samplings = [self._slots.sampling[slot] for slot in slots.tolist()]
        bias_ids = [sampling.bias_ids for sampling in samplings]
        if any(bias_ids):
            values = np.frombuffer(b"".join(sampling.bias_values for sampling in samplings), "<f4").copy()
            x.index_put_(self._cells(bias_ids), send_to_device(values, self._device).to(x.dtype), accumulate=True)
        x = self._penalties.apply(x, slots)
        num_output = positions - self._slots.num_prompt_tokens[slots]
        masked = [s.stop_ids if num < s.min_tokens else b"" for s, num in zip(samplings, num_output, strict=True)]
        if any(masked):
            x.index_put_(self._cells(masked), x.new_full((), -torch.inf))
        return filter_logits(x, self._filters.of(slots))

    def _cells(self, packed_ids: list[bytes]) -> tuple[Tensor, Tensor]:
        """(row, token id) of all ids in a list of packed ids per row."""
        rows = np.repeat(np.arange(len(packed_ids)), [len(ids) // 4 for ids in packed_ids])
        ids = np.frombuffer(b"".join(packed_ids), "<i4").astype(np.int64)
        return send_to_device(rows, self._device), send_to_device(ids, self._device)


class _Penalties:
    """Which tokens each slot's prompt holds, and how often its output holds each. Memory is taken at first need."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        self._shape, self._device = (num_slots, vocab_size), device
        self._is_penalized = np.zeros(num_slots, bool)
        self._values = np.zeros((num_slots, 3), np.float32)  # repetition, frequency, presence
        self._values[:, 0] = 1.0
        self._in_prompt: Tensor | None = None  # [num_slots, vocab] bool device
        self._in_output: Tensor | None = None  # [num_slots, vocab] i32 device

    def admit(self, slot: int, sampling: Sampling, token_ids: NDArray[np.int32], num_prompt_tokens: int) -> bool:
        """Whether the request has penalties; if so, its prompt and earlier output are counted."""
        values = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._values[slot] = values
        self._is_penalized[slot] = values != (1.0, 0.0, 0.0)
        if not self._is_penalized[slot]:
            return False
        if self._in_prompt is None or self._in_output is None:
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._in_output = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        ids = send_to_device(token_ids.astype(np.int64), self._device)
        self._in_prompt[slot] = False
        self._in_prompt[slot, ids[:num_prompt_tokens]] = True
        output = ids[num_prompt_tokens:]
        self._in_output[slot] = 0
        self._in_output[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return True

    def count(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Add new tokens [num_rows], on the device, to the output of their slots, where these are counted."""
        counted = np.flatnonzero(self._is_penalized[slots])
        if len(counted) and self._in_output is not None:
            where = send_to_device(slots[counted], self._device)
            self._in_output[where, tokens[send_to_device(counted, self._device)]] += 1

    def apply(self, x: Tensor, slots: NDArray[np.int64]) -> Tensor:
        """Repetition as Keskar et al. 2019 (CTRL) define it; frequency and presence as OpenAI's API does."""
        rows = np.flatnonzero(self._is_penalized[slots])
        if not len(rows) or self._in_prompt is None or self._in_output is None:
            return x
        index, where = send_to_device(rows, self._device), send_to_device(slots[rows], self._device)
        values = self._values[slots[rows]]
        repetition, frequency, presence = send_to_device(values, self._device).to(x.dtype)[:, :, None].unbind(1)
        part, in_output = x[index], self._in_output[where]
        if (values[:, 0] != 1.0).any():
            seen = self._in_prompt[where] | (in_output > 0)
            part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        if values[:, 1].any():
            part -= frequency * in_output
        if values[:, 2].any():
            part -= presence * (in_output > 0)
        x[index] = part
        return x


def extras_bytes(max_running_req: int, vocab_size: int) -> int:
    """Device memory that extras take at most, so that it can be kept free."""
    return vocab_size * (ROWS_AT_ONCE * EXTRAS_BYTES_PER_LOGIT + (max_running_req + 1) * 5)


def _log_probabilities(logits: Tensor, tokens: Tensor, num_best: NDArray[np.int64]) -> Logprobs:
    """For each row of logits [n, vocab], its token [n] and then its num_best [n] most likely ones, best first."""
    device = logits.device
    logprobs = logits.to(compute_dtype(logits.dtype)).log_softmax(1)
    best = logprobs.topk(int(num_best.max()))
    chosen = tokens[:, None]
    ids = torch.cat([chosen, best.indices], 1)
    values = torch.cat([logprobs.gather(1, chosen), best.values], 1)
    items = np.flatnonzero(np.arange(ids.shape[1]) <= num_best[:, None])
    where = send_to_device(items, device)
    return Logprobs(ids.flatten()[where].to(torch.int32), values.flatten()[where].to(torch.float32))


def _split_rows(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]
