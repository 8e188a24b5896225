"""The proof that the simulation finds faults: each mutant of the scheduler is found within its budget of seeds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.mutants import MUTANTS, Mutant, mutate
from tests.unit.test_simulator import NUM_SEEDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.time_limit(120)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_simulate_mutant_is_found_within_its_budget(mutant: Mutant):
    assert mutant.budget <= NUM_SEEDS  # without the fault, all these seeds pass: test_simulator runs them
    command = [sys.executable, "-m", "tests.unit.mutants", mutant.name, f"0:{mutant.budget}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert run.returncode in (1, 2, 3), f"not found in {mutant.budget} seeds: {run.stdout}{run.stderr}"
    assert "python -m tests.unit.simulator --seed" in run.stdout, run.stderr  # found, not failed to load


def test_mutate_each_mutant_fits_the_source_and_compiles():
    for mutant in MUTANTS:
        source = (ROOT / "minisgl" / "scheduler" / f"{mutant.module}.py").read_text()
        assert compile(mutate(mutant, source), mutant.name, "exec") != compile(source, mutant.name, "exec")


@pytest.mark.parametrize("times", [0, 2])
def test_mutate_fragment_not_there_exactly_once_is_an_error(times):
    with pytest.raises(ValueError, match=f"occurs {times} times"):
        mutate(MUTANTS[0], MUTANTS[0].fragment * times)
