"""The scheduler under simulation: thousands of seeds, and the proof that the simulation finds faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.mutants import MUTANTS, Mutant, mutate
from tests.unit.simulator import KINDS, Simulation

ROOT = Path(__file__).resolve().parents[2]
NUM_SEEDS = 5000
NUM_PROCESSES = 2
LEAST_SHARE = 0.02  # of the seeds, for each kind of event


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.time_limit(240)
def test_every_seed_gives_right_answers_and_every_kind_of_event_occurs() -> None:
    share = NUM_SEEDS // NUM_PROCESSES
    runs = [start("tests.unit.simulator", "--seeds", f"{i * share}:{(i + 1) * share}") for i in range(NUM_PROCESSES)]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * NUM_PROCESSES, "\n".join(outputs)
    reports = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert sum(report["num_seeds"] for report in reports) == NUM_SEEDS
    for kind in KINDS:
        num_seeds = sum(report["seeds_with"].get(kind, 0) for report in reports)
        assert num_seeds >= LEAST_SHARE * NUM_SEEDS, f"only {num_seeds} of {NUM_SEEDS} seeds had a {kind}"


def test_same_seed_gives_the_same_events() -> None:
    for seed in range(20):
        logs: list[list[str]] = [[], []]
        for log in logs:
            Simulation(seed, log).run()
        assert logs[0] == logs[1] and len(logs[0]) > 5


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found_within_its_budget(mutant: Mutant) -> None:
    run = start("tests.unit.run_mutant", mutant.name, f"0:{mutant.budget}")
    output, _ = run.communicate()
    assert run.returncode in (1, 2, 3) and "python -m tests.unit.simulator --seed" in output, output


def test_mutant_whose_fragment_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutate(MUTANTS[0], "nothing of the kind")
