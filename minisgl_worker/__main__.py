"""`python -m minisgl_worker`: a worker of an engine, or the replay of a recorded run."""

import argparse
import ctypes
import faulthandler
import logging
import os
import sys

from minisgl.lifeline import STACKS_SIGNAL, watch_parent

# How long (in loop turns, about a microsecond in all) an idle thread of torch's pool spins before it sleeps. Spinning
# for as long as the OpenMP runtime does by default takes the core away from whoever the thread waits for: on two cores,
# one of them busy, decoding ran 7 to 15 times slower.
OMP_SPIN_TURNS = "1000"
# Prepared matrix products that each of the two caches of torch's CPU library keeps, 1024 by default. Every length of a
# prompt needs its own: after ten minutes of mixed prompts those of a 135M model held 450 MB. A step needs only a few.
NUM_KEPT_PRODUCTS = "16"
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one.

    Left alone it returns large blocks to the kernel, which then clears and maps them page by page again: that took
    nearly half of a CPU's prefill step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def main() -> int:
    # Read when torch is imported, which comes later.
    os.environ.setdefault("GOMP_SPINCOUNT", OMP_SPIN_TURNS)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", NUM_KEPT_PRODUCTS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", NUM_KEPT_PRODUCTS)
    keep_freed_memory()
    parser = argparse.ArgumentParser(prog="minisgl_worker", description=__doc__)
    parser.add_argument("--steps", metavar="ADDRESS", help="channel that brings the steps")
    parser.add_argument("--results", metavar="ADDRESS", help="channel that takes the results")
    parser.add_argument("--death-fd", type=int, metavar="FD", help="pipe that closes when the engine ends")
    parser.add_argument("--replay", metavar="FILE", help="run the steps that an engine recorded with --record-steps")
    parser.add_argument("--repeat", type=int, default=1, help="with --replay: number of runs")
    parser.add_argument("--expect", metavar="DIGEST", help="with --replay: exit 1 unless the tokens have this digest")
    parser.add_argument("--trace", metavar="FILE", help="with --replay: write a profile of the last run")
    parser.add_argument("--breakdown", action="store_true", help="with --replay: print where a step's time goes")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {arguments.repeat}")
    logging.basicConfig(level=logging.WARNING, format="minisgl worker: %(levelname)s %(message)s", stream=sys.stderr)
    if arguments.replay:
        from minisgl_worker.replay import replay  # it imports torch, which a worker's start must not wait for

        return replay(
            arguments.replay, arguments.repeat, arguments.trace, arguments.expect, has_breakdown=arguments.breakdown
        )
    if not arguments.steps or not arguments.results:
        parser.error("--steps and --results are needed, or --replay")
    if arguments.death_fd is not None:
        watch_parent(arguments.death_fd, kill_at_parents_end=True)  # started by the engine's main thread
    faulthandler.register(STACKS_SIGNAL)
    from minisgl_worker.worker import Worker  # after the watcher is on

    return Worker(arguments.steps, arguments.results).run()


if __name__ == "__main__":
    sys.exit(main())
