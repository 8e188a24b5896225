"""`python -m tests.unit.run_mutant NAME FIRST:END`: the simulation with a fault put into the scheduler."""

import sys

from tests.unit.mutants import install

if __name__ == "__main__":
    install(sys.argv[1])
    from tests.unit import simulator  # only now: it imports the scheduler

    sys.argv = ["simulator", "--seeds", sys.argv[2]]
    sys.exit(simulator.main())
