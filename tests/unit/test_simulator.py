"""The scheduler under simulation: thousands of seeds, each with all that one run can meet."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.unit import simulator
from tests.unit.simulator import Simulation

ROOT = Path(__file__).resolve().parents[2]
NUM_SEEDS = 5000
NUM_PROCESSES = 2
# The least share of the seeds in which each kind of event occurs.
KINDS = dict.fromkeys(
    ("preemption", "eviction", "hit", "chunked_prefill", "abort_in_flight", "slot_turnover", "shared_pending_prefix",
     "held_row", "overtaken", "stop", "failed_row", "surplus_row", "disconnect", "overloaded", "refused", "reused_id"),
    0.02,
) | dict.fromkeys(("large_prefill", "end_while_preempted", "abort_while_preempted"), 0.005)  # fmt: skip


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.unit.simulator", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def finish(run: "subprocess.Popen[str]") -> dict:
    output, _ = run.communicate()
    assert run.returncode == 0, output
    return json.loads(output.splitlines()[-1])


@pytest.mark.time_limit(300)
def test_simulate_thousands_of_seeds_all_is_right_and_each_kind_of_event_occurs():
    share = NUM_SEEDS // NUM_PROCESSES
    runs = [start("--seeds", f"{i * share}:{(i + 1) * share}") for i in range(NUM_PROCESSES)]
    reports = [finish(run) for run in runs]
    assert sum(report["num_seeds"] for report in reports) == NUM_SEEDS
    seeds_with = sum((Counter(report["seeds_with"]) for report in reports), Counter())
    rare = {kind: seeds_with[kind] for kind, share in KINDS.items() if seeds_with[kind] < share * NUM_SEEDS}
    assert not rare, f"kinds of events in too few of {NUM_SEEDS} seeds: {rare}"


@pytest.mark.parametrize("seed", [66126])  # a preempted request that was aborted while it drained barred the way
def test_simulate_seed_that_failed_once_is_right(seed):
    Simulation(seed).run()


def test_simulate_same_seeds_in_other_processes_gives_the_same_steps_and_outputs():
    runs = [start("--seeds", "0:60", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert len({finish(run)["digest"] for run in runs}) == 1


def test_simulate_same_seed_twice_gives_the_same_events():
    for seed in range(10):
        logs: list[list[str]] = [[], []]
        for log in logs:
            Simulation(seed, log).run()
        assert logs[0] == logs[1] and len(logs[0]) > 5


@pytest.mark.parametrize(
    ("error", "code"), [(simulator.Wrong, 1), (AssertionError, 1), (simulator.NoProgress, 2), (KeyError, 3)]
)
def test_report_failure_names_the_seed_and_the_command_that_replays_it(error, code, capsys):
    class Failing(Simulation):
        def run(self):
            raise error("as arranged")

    assert simulator.run_seed(17, make=Failing)[0] == code
    assert "python -m tests.unit.simulator --seed 17" in capsys.readouterr().out
