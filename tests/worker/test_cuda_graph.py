"""The step that graphs hold, run without a graph on a CPU, against the eager step."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl_worker.attention.base import AttentionBackend, ForwardBatch, HostRows
from minisgl_worker.cuda_graph import DecodeGraphs, choose_buckets
from minisgl_worker.model_runner import ModelRunner
from tests.worker.checkpoints import GREEDY, make_admit, make_step, read_tokens, write_checkpoint

DRAWN = dataclasses.replace(GREEDY, temperature=1.0)
PENALIZED = dataclasses.replace(GREEDY, frequency_penalty=1.5, num_logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("graph"))


def make_runner(folder: Path, *, with_graphs: bool) -> ModelRunner:
    torch.set_num_threads(1)
    config = EngineConfig.from_options(
        folder, {"device": "cpu", "num_pages": 32, "page_size": 4, "max_running_req": 5, "max_seq_len": 64}
    )
    runner = ModelRunner(config)
    if with_graphs:
        runner._graphs = DecodeGraphs([1, 2, 4], runner._slots, runner.kv, runner._backend, runner._model.forward)
        with torch.inference_mode():
            runner._graphs.capture()
    return runner


def run_mixed_steps(runner: ModelRunner) -> list[list[int]]:
    """Three requests of several kinds that join, grow over pages, and leave; then slots are used again."""
    samplings = [GREEDY, DRAWN, PENALIZED]
    admits = tuple(
        make_admit(
            slot, list(range(5 + slot, 12 + slot)), [slot * 4, slot * 4 + 1], sampling=samplings[slot], seed=slot
        )
        for slot in range(3)
    )
    steps = [
        make_step(0, admits=admits[:2], prefills=(0, 0, 7, 1, 1, 0, 5, 0)),
        make_step(1, decode=[0], run_decode=True, prefills=(1, 5, 2, 1)),
        make_step(2, decode=[0, 1], run_decode=True, grants=(0, 2, 2)),
        make_step(3, run_decode=True, grants=(1, 2, 6)),
        make_step(4, admits=admits[2:], run_decode=True, prefills=(2, 0, 7, 1)),
        make_step(5, decode=[2, 0, 1], run_decode=True, grants=(2, 2, 10)),
        make_step(6, run_decode=True, grants=(0, 3, 3)),
        make_step(7, decode=[1], run_decode=True, grants=(1, 3, 7)),
        make_step(8, decode=[1, 2], run_decode=True),
        make_step(9, admits=(make_admit(0, [3, 4, 5], [20], seed=9),), run_decode=True, prefills=(0, 0, 3, 1)),
        make_step(10, decode=[0, 2, 1], run_decode=True, grants=(0, 1, 21)),
        make_step(11, run_decode=True, grants=(2, 3, 22, 1, 4, 23)),
    ]
    results = [runner.execute(step).result() for step in steps]
    return [read_tokens(result.tokens) + read_tokens(result.logprob_ids) for result in results]


def test_replay_equals_eager(folder: Path) -> None:
    eager = run_mixed_steps(make_runner(folder, with_graphs=False))
    assert run_mixed_steps(make_runner(folder, with_graphs=True)) == eager
    assert len({tuple(tokens) for tokens in eager}) > 6, "the steps are too much alike to prove anything"


@pytest.mark.parametrize(
    ("max_running", "sizes", "max_size", "expected"),
    [
        (4, None, None, [1, 2, 4]),
        (9, None, None, [1, 2, 4, 8, 9]),
        (4, (), None, []),
        (4, None, 0, []),
        (64, (3, 80, 1), None, [1, 3, 64]),
        (64, (3, 80, 1), 16, [1, 3]),
    ],
)
def test_choose_buckets_follows_the_options(max_running, sizes, max_size, expected) -> None:
    assert choose_buckets(max_running, sizes, max_size) == expected


def test_default_buckets_waste_few_rows() -> None:
    buckets = choose_buckets(1000, None, None)
    assert buckets[0] == 1 and buckets[-1] == 256
    assert all(after - before <= 16 for before, after in pairwise(buckets))


class HostRowsChecker:
    """The plain backend, which compares what the host says of the rows of each step with what the device then holds."""

    def __init__(self, plain: AttentionBackend):
        self._plain = plain
        self._rows: list[tuple[int, list[int]]] = []
        self.seen: list[list[int]] = []  # lengths of each replayed step's rows

    def plan_replay(self, rows: HostRows) -> None:
        self._rows = [
            (int(length), rows.page_table[slot, : -(-length // 4)].tolist())
            for length, slot in zip(rows.seq_lens, rows.slots, strict=True)
        ]
        self.seen.append(rows.seq_lens.tolist())

    def plan(self, batch: ForwardBatch) -> None:
        if batch.decode_slots is None:
            assert batch.host is not None
            self.plan_replay(batch.host)
        slots = range(batch.num_decode) if batch.decode_slots is None else batch.decode_slots.tolist()
        lengths, table = batch.decode_seq_lens.tolist(), batch.decode_page_table.tolist()
        assert self._rows == [(lengths[slot], table[slot][: -(-lengths[slot] // 4)]) for slot in slots]

    def attend(self, query: torch.Tensor, layer: int, batch: ForwardBatch) -> torch.Tensor:
        return self._plain.attend(query, layer, batch)


def test_host_rows_of_every_step_equal_the_devices_state(folder: Path) -> None:
    """A plan made of old lengths or pages would give wrong results without any sign of it."""
    for with_graphs in (False, True):
        runner = make_runner(folder, with_graphs=False)
        checker = runner._backend = HostRowsChecker(runner._backend)
        if with_graphs:
            runner._graphs = DecodeGraphs([1, 2, 4], runner._slots, runner.kv, checker, runner._model.forward)
            with torch.inference_mode():
                runner._graphs.capture()
        run_mixed_steps(runner)
        padded = [lengths for lengths in checker.seen if len(lengths) == 4 and lengths[-1] == 1 < min(lengths[:-1])]
        assert len(padded) == (4 if with_graphs else 0)
