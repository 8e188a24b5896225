"""The real worker with a fault of one rank: `MINISGL_FAULT` is `kind@rank` or `kind:step@rank`.

Kinds: never_join; and at a step: kill, freeze, sleep, raise, other_token. Digests are compared after every step.
"""

import argparse
import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass, replace

from minisgl.lifeline import STACKS_SIGNAL, watch_parent
from minisgl.protocol import Configure, Result, Step
from minisgl_worker.worker import Worker


@dataclass(frozen=True)
class OtherTokens:
    """A handle whose result differs."""

    step_id: int
    right: Result

    def result(self) -> Result:
        return replace(self.right, tokens=bytes([self.right.tokens[0] ^ 1]) + self.right.tokens[1:])


class FaultyRunner:
    def __init__(self, runner: object, kind: str, step_id: int):
        self._runner, self._kind, self._step_id = runner, kind, step_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def execute(self, step: Step) -> object:
        is_now = step.step_id == self._step_id
        if is_now and self._kind in ("kill", "freeze"):
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)
        if is_now and self._kind == "sleep":
            time.sleep(60)
        if is_now and self._kind == "raise":
            raise ValueError("a scripted fault")
        handle = self._runner.execute(step)
        return OtherTokens(step.step_id, handle.result()) if is_now and self._kind == "other_token" else handle


class FaultyWorker(Worker):
    def _load(self, configure: Configure) -> object:
        what, _, rank = os.environ.get("MINISGL_FAULT", "").partition("@")
        kind, _, step = what.partition(":")
        if int(rank or -1) != configure.rank:
            return super()._load(configure)
        if kind == "never_join":
            time.sleep(60)
        return FaultyRunner(super()._load(configure), kind, int(step or -1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--steps", "--results", "--death-fd"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    faulthandler.register(STACKS_SIGNAL)
    watch_parent(int(arguments.death_fd), kill_at_parents_end=True)
    sys.exit(FaultyWorker(arguments.steps, arguments.results, digest_interval=1).run())
