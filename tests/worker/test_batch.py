"""The state of slots and the packed batch, against a slow twin that goes token by token."""

import dataclasses
import random

import numpy as np
import torch

from minisgl_worker.attention.base import ForwardBatch
from minisgl_worker.batch import SlotState, StepBatch
from minisgl_worker.kv_cache import KVCache
from tests.worker.checkpoints import GREEDY, make_admit, make_step

CPU = torch.device("cpu")
NUM_SLOTS, MAX_PAGES, PAGE_SIZE = 4, 8, 4


def make_slots() -> SlotState:
    return SlotState(NUM_SLOTS, MAX_PAGES, CPU)


def make_kv() -> KVCache:
    return KVCache(1, NUM_SLOTS * MAX_PAGES, PAGE_SIZE, 1, 2, torch.float32, CPU)


def test_admit_overwrites_the_whole_slot() -> None:
    """Nothing of the slot's former request may show in the next one."""
    slots = make_slots()
    first = dataclasses.replace(GREEDY, temperature=0.7, top_k=3, num_logprobs=2)
    slots.apply(make_step(0, admits=(make_admit(1, list(range(20)), [1, 2, 3, 4, 5], sampling=first, seed=2**64 - 1),)))
    assert slots.seeds[1] == -1, "the bits of a u64"
    slots.build(make_step(0, prefills=(1, 0, 20, 1)), make_kv())
    slots.apply(make_step(1, admits=(make_admit(1, [7, 8, 9, 10, 11], [6, 7], seed=5, num_cached=4, num_prompt=3),)))
    assert slots.token_ids(1).tolist() == [7, 8, 9, 10, 11]
    assert slots.seq_lens[1] == 4 and slots.num_prompt_tokens[1] == 3
    assert slots.page_table[1, :2].tolist() == [6, 7]
    assert slots.sampling[1] == GREEDY and slots.temperature[1] == 0.0 and slots.seeds[1] == 5


def test_page_grants_come_after_admits() -> None:
    slots = make_slots()
    slots.apply(make_step(0, admits=(make_admit(0, [1], [3]),), grants=(0, 1, 9, 2, 5, 4, 0, 0, 8)))
    assert slots.page_table[0, :2].tolist() == [8, 9] and slots.page_table[2, 5] == 4


def test_decode_set_persists_until_it_is_replaced() -> None:
    slots, kv = make_slots(), make_kv()
    admits = tuple(make_admit(slot, [slot], [slot * 2, slot * 2 + 1]) for slot in range(3))

    def run(**step: object) -> list[int]:
        made = make_step(0, **step)
        slots.apply(made)
        return slots.build(made, kv).sampling_slots.tolist()

    assert run(admits=admits, prefills=(0, 0, 1, 1, 1, 0, 1, 1)) == [0, 1]
    assert run(decode=[1, 0], run_decode=True) == [1, 0]
    assert run(run_decode=True) == [1, 0]
    assert run(prefills=(2, 0, 1, 1)) == [2], "held: the set stays, its rows do not run"
    assert run(run_decode=True) == [1, 0]
    assert run(decode=[2, 1], run_decode=False) == []
    assert run(run_decode=True) == [2, 1]
    assert run(decode=[], run_decode=True) == []
    assert slots.seq_lens[:3].tolist() == [4, 5, 2]


def test_decode_rows_continue_from_the_token_on_the_device() -> None:
    slots, kv = make_slots(), make_kv()
    slots.apply(make_step(0, admits=(make_admit(0, [5, 6], [0]), make_admit(3, [7], [1])), decode=[3, 0]))
    slots.store_tokens(np.array([0, 3]), torch.tensor([41, 42]))
    slots.seq_lens[[0, 3]] = 2, 1
    step = make_step(1, run_decode=True)
    assert slots.build(step, kv).tokens.tolist() == [42, 41]
    slots.store_tokens(np.array([3, 0]), torch.tensor([50, 51]))
    batch = slots.build(step, kv)
    assert batch.tokens.tolist() == [50, 51] and batch.forward.positions.tolist() == [2, 3]


class SlowTwin:
    """The same as `SlotState`, by dictionaries and loops."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def expect(self, decode: list[int], prefills: list[tuple[int, int, int, int]]) -> dict[str, list[int]]:
        want: dict[str, list[int]] = {name: [] for name in ("tokens", "positions", "locations", "rows", "slots", "at")}
        for slot in decode:
            self._add(want, slot, self.lengths[slot], 100 + slot)
            self._sample(want, slot)
        for slot, start, length, is_last in prefills:
            for position in range(start, start + length):
                self._add(want, slot, position, self.tokens[slot][position])
            if is_last:
                self._sample(want, slot)
        return want

    def _add(self, want: dict[str, list[int]], slot: int, position: int, token: int) -> None:
        want["tokens"].append(token)
        want["positions"].append(position)
        page = self.pages[slot][position // PAGE_SIZE]
        want["locations"].append(page * PAGE_SIZE + position % PAGE_SIZE)
        self.lengths[slot] = position + 1

    def _sample(self, want: dict[str, list[int]], slot: int) -> None:
        want["rows"].append(len(want["tokens"]) - 1)
        want["slots"].append(slot)
        want["at"].append(self.lengths[slot])


def read_batch(batch: StepBatch) -> dict[str, list[int]]:
    forward = batch.forward
    return {
        "tokens": batch.tokens.tolist(), "positions": forward.positions.tolist(),
        "locations": forward.kv_locations.tolist(), "rows": forward.sampling_rows.tolist(),
        "slots": batch.sampling_slots.tolist(), "at": batch.sampling_positions.tolist(),
    }  # fmt: skip


def check_attention_inputs(forward: ForwardBatch, decode: list[int], twin: SlowTwin) -> None:
    """What attention reads: whole page tables as far as the tokens go, lengths with the new token."""
    assert forward.decode_seq_lens.tolist() == [twin.lengths[slot] for slot in decode]
    for row, slot in enumerate(decode):
        needed = -(-twin.lengths[slot] // PAGE_SIZE)
        assert forward.decode_page_table[row, :needed].tolist() == twin.pages[slot][:needed]
    first_row = len(decode)
    for row in forward.prefills:
        assert row.first_row == first_row and len(row.page_ids) == -(
            -(row.first_position + row.num_tokens) // PAGE_SIZE
        )
        first_row += row.num_tokens


def test_batches_of_random_steps_equal_the_slow_twin() -> None:
    """Requests join with and without a cached prefix, are computed in chunks, decode, and are replaced."""
    rng, slots, kv, twin = random.Random(1), make_slots(), make_kv(), SlowTwin()
    kinds = set()
    for step_id in range(400):
        decoding = [s for s in twin.lengths if len(twin.tokens[s]) <= twin.lengths[s] < MAX_PAGES * PAGE_SIZE]
        admits, prefills, grants = [], [], []
        for slot in range(NUM_SLOTS):
            if slot not in twin.lengths or (twin.lengths[slot] > 20 and rng.random() < 0.3):
                twin.tokens[slot] = [rng.randrange(100) for _ in range(rng.randint(1, 14))]
                pages = rng.sample(range(NUM_SLOTS * MAX_PAGES), MAX_PAGES)
                twin.pages[slot] = pages
                twin.lengths[slot] = rng.randrange(len(twin.tokens[slot])) // PAGE_SIZE * PAGE_SIZE
                num_first = -(-len(twin.tokens[slot]) // PAGE_SIZE)
                admits.append(make_admit(slot, twin.tokens[slot], pages[:num_first], num_cached=twin.lengths[slot]))
                grants += [value for i in range(num_first, MAX_PAGES) for value in (slot, i, pages[i])]
                decoding = [s for s in decoding if s != slot]
            if (left := len(twin.tokens[slot]) - twin.lengths[slot]) > 0 and rng.random() < 0.7:
                length = rng.randint(1, left)
                prefills.append((slot, twin.lengths[slot], length, int(length == left)))
        decode = rng.sample(decoding, rng.randint(0, len(decoding)))
        flat = tuple(value for row in prefills for value in row)
        step = make_step(
            step_id, admits=tuple(admits), grants=tuple(grants), decode=decode, run_decode=True, prefills=flat
        )
        slots.apply(step)
        slots.store_tokens(np.arange(NUM_SLOTS), torch.arange(100, 100 + NUM_SLOTS))
        batch = slots.build(step, kv)
        assert read_batch(batch) == twin.expect(decode, prefills)
        check_attention_inputs(batch.forward, decode, twin)
        assert all(slots.seq_lens[slot] == length for slot, length in twin.lengths.items())
        kinds.add((bool(decode), bool(prefills), any(row[3] for row in prefills), any(row[1] for row in prefills)))
    assert len(kinds) >= 8, "the steps are too much alike to prove anything"
