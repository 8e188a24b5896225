#!/usr/bin/env python3
"""Simulates the scheduler for many seeds in several processes; stops at the first failure.

python scripts/soak.py --seeds 0:500000 --processes 2
"""

import argparse
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

CHUNK = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500000", metavar="FIRST:END")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    first, end = map(int, arguments.seeds.split(":"))
    chunks = deque(range(first, end, CHUNK))
    running: dict[subprocess.Popen[str], int] = {}
    started, num_done = time.monotonic(), 0
    while chunks or running:
        while chunks and len(running) < arguments.processes:
            begin = chunks.popleft()
            running[start(begin, min(begin + CHUNK, end))] = begin
        time.sleep(0.05)
        for process in [process for process in running if process.poll() is not None]:
            output, _ = process.communicate()
            begin = running.pop(process)
            num_done += min(CHUNK, end - begin)
            if process.returncode:
                for other in running:
                    other.kill()
                print(output, end="")
                return process.returncode
            print(f"{num_done} seeds in {time.monotonic() - started:.0f} s, all well", flush=True)
    return 0


def start(first: int, end: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.unit.simulator", "--seeds", f"{first}:{end}"]
    return subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    sys.exit(main())
