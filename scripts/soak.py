#!/usr/bin/env python3
"""Simulates the scheduler for many seeds in several processes; stops at the first failure.

    python scripts/soak.py --seeds 0:500000 --processes 2

Stopped in between (Ctrl-C, a failure), it prints the command that goes on with the seeds that are not done.
Exit codes: 0 all well, 1 to 3 those of the simulator, 130 interrupted.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

CHUNK = 1000
ROOT = Path(__file__).resolve().parents[1]


class Soak:
    """Chunks of seeds, each a process; `running` has the first seed of each."""

    def __init__(self, first: int, end: int, num_processes: int) -> None:
        self.first, self.end, self.num_processes = first, end, num_processes
        self.chunks = deque(range(first, end, CHUNK))
        self.running: dict[subprocess.Popen[str], int] = {}
        self.started = time.monotonic()

    @property
    def first_not_done(self) -> int:
        return min([*self.running.values(), *self.chunks], default=self.end)

    def run(self) -> int:
        while self.chunks or self.running:
            while self.chunks and len(self.running) < self.num_processes:
                begin = self.chunks.popleft()
                self.running[start(begin, min(begin + CHUNK, self.end))] = begin
            time.sleep(0.05)
            for process in [process for process in self.running if process.poll() is not None]:
                output, _ = process.communicate()
                if process.returncode:
                    print(output, end="")
                    return abs(process.returncode)
                del self.running[process]
                seconds = time.monotonic() - self.started
                print(f"seeds {self.first}:{self.first_not_done} are well, after {seconds:.0f} s", flush=True)
        return 0

    def stop(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it may well come twice
        for process in self.running:
            process.kill()
            process.wait()
        if self.first_not_done < self.end:
            print(f"to go on: python scripts/soak.py --seeds {self.first_not_done}:{self.end}")


def start(first: int, end: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.unit.simulator", "--seeds", f"{first}:{end}"]
    # In a session of its own, so that Ctrl-C reaches this program alone.
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500000", metavar="FIRST:END")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    soak = Soak(*map(int, arguments.seeds.split(":")), arguments.processes)
    try:
        return soak.run()
    except KeyboardInterrupt:
        return 130
    finally:
        soak.stop()


if __name__ == "__main__":
    sys.exit(main())
