"""The state of every slot, how a Step changes it, and the packed batch that a Step asks for.

Only what depends on sampled tokens lives on the device (`last_token`); page tables and lengths are known to the host
when a step is issued, so the host's own copy runs ahead of the device and nothing ever waits for a token value.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minisgl.protocol import Admit, Sampling, Step
from minisgl_worker.attention.base import ForwardBatch, HostRows, PrefillRow
from minisgl_worker.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes."""

    tokens: Tensor  # [num_tokens] i64 device
    forward: ForwardBatch
    sampling_slots: NDArray[np.int64]  # [num_sampling_rows]
    sampling_positions: NDArray[np.int64]  # [num_sampling_rows] number of tokens before the one that is sampled


class SlotState:
    """Everything the worker knows of the requests it runs, by slot. The last slot is a dummy for padding rows.

    Attributes:
        seq_lens: [num_slots + 1] i64 host, tokens whose KV is written or promised by the steps so far.
        page_table: [num_slots + 1, max_pages] i32 host; entries past a slot's pages are old or zero, always valid ids.
        last_token: [num_slots + 1] i64 device, each slot's newest token.
        temperature, seeds: [num_slots + 1] f32, i64 (the bits of a u64) device.
        sampling, num_prompt_tokens: per slot, host.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device):
        self.num_slots = num_slots
        self.seq_lens = np.zeros(num_slots + 1, np.int64)
        self.page_table = np.zeros((num_slots + 1, max_pages), np.int32)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_slots + 1, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.sampling: list[Sampling | None] = [None] * (num_slots + 1)
        self.num_prompt_tokens = np.zeros(num_slots + 1, np.int64)
        self.decode_slots = np.zeros(0, np.int64)
        self._token_ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)] * (num_slots + 1)
        self._device = device

    def apply(self, step: Step) -> None:
        """Admits, then page grants, then the decode set."""
        for admit in step.admits:
            self._admit(admit)
        grants = np.frombuffer(step.page_grants, "<i4").reshape(-1, 3)
        self.page_table[grants[:, 0], grants[:, 1]] = grants[:, 2]
        if step.decode_slots is not None:
            self.decode_slots = np.frombuffer(step.decode_slots, "<i4").astype(np.int64)

    def token_ids(self, slot: int) -> NDArray[np.int32]:
        """The tokens that the slot was admitted with."""
        return self._token_ids[slot]

    def _admit(self, admit: Admit) -> None:
        slot = admit.slot
        pages = np.frombuffer(admit.page_ids, "<i4")
        self.page_table[slot, : len(pages)] = pages
        self.seq_lens[slot] = admit.num_cached_tokens
        self._token_ids[slot] = np.frombuffer(admit.token_ids, "<i4")
        self.num_prompt_tokens[slot] = admit.num_prompt_tokens
        self.sampling[slot] = admit.sampling
        self.temperature[slot] = admit.sampling.temperature
        self.seeds[slot] = admit.seed - (1 << 64) if admit.seed >= 1 << 63 else admit.seed

    def store_tokens(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Make tokens [n] i64 the newest ones of slots [n]."""
        self.last_token[send_to_device(slots, self._device)] = tokens

    def build(self, step: Step, kv: KVCache) -> StepBatch:
        """The batch of an applied step; advances `seq_lens` past it."""
        decode = self.decode_slots if step.run_decode else self.decode_slots[:0]
        prefills = np.frombuffer(step.prefills, "<i4").reshape(-1, 4)
        first = self.seq_lens[decode]
        positions = [first, *(np.arange(start, start + length) for _, start, length, _ in prefills)]
        owners = np.repeat(
            np.concatenate([decode, prefills[:, 0].astype(np.int64)]),
            np.concatenate([np.ones(len(decode), np.int64), prefills[:, 2].astype(np.int64)]),
        )
        all_positions = np.concatenate(positions)
        pages = self.page_table[owners, all_positions // kv.page_size].astype(np.int64)
        locations = pages * kv.page_size + all_positions % kv.page_size
        self.seq_lens[decode] += 1
        self.seq_lens[prefills[:, 0]] = prefills[:, 1] + prefills[:, 2]

        last_chunk = prefills[:, 3] != 0
        chunk_ends = len(decode) + np.cumsum(prefills[:, 2], dtype=np.int64)
        sampling_slots = np.concatenate([decode, prefills[last_chunk, 0].astype(np.int64)])
        width = int(-(-(first.max(initial=0) + 1) // kv.page_size))
        forward = ForwardBatch(
            kv=kv,
            positions=self._to_device(all_positions),
            kv_locations=self._to_device(locations),
            num_decode=len(decode),
            decode_page_table=self._to_device(self.page_table[decode, :width]),
            decode_seq_lens=self._to_device((first + 1).astype(np.int32)),
            decode_slots=None,
            prefills=self._prefill_rows(prefills, len(decode), kv.page_size),
            sampling_rows=self._to_device(np.concatenate([np.arange(len(decode)), chunk_ends[last_chunk] - 1])),
            host=HostRows(first + 1, self.page_table, decode),
        )
        return StepBatch(self._gather_tokens(decode, prefills), forward, sampling_slots, self.seq_lens[sampling_slots])

    def _prefill_rows(self, prefills: NDArray[np.int32], row: int, page_size: int) -> tuple[PrefillRow, ...]:
        rows = []
        for slot, start, length, _ in prefills.tolist():
            pages = self.page_table[slot, : -(-(start + length) // page_size)].copy()
            rows.append(PrefillRow(row, length, start, torch.from_numpy(pages)))
            row += length
        return tuple(rows)

    def _gather_tokens(self, decode: NDArray[np.int64], prefills: NDArray[np.int32]) -> Tensor:
        """Decode rows continue from the token on the device, prefill rows from the ids that came with the admit."""
        chunks = [self._token_ids[slot][start : start + length] for slot, start, length, _ in prefills.tolist()]
        parts = [self.last_token[self._to_device(decode)]]
        if chunks:
            parts.append(self._to_device(np.concatenate(chunks).astype(np.int64)))
        return torch.cat(parts)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return send_to_device(array, self._device)


def send_to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it (through pinned memory, which torch keeps that long)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
