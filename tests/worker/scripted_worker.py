"""The worker's process around a model and a device that follow a script, without torch.

The script is `kind:step,kind:step`. Kinds: raise (the launch raises), and of the device: fault, slow, hang.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

from minisgl.protocol import Configure, Result, Step
from minisgl_worker.worker import Worker


@dataclass(frozen=True)
class ScriptedHandle:
    step_id: int
    kind: str

    def result(self) -> Result:
        if self.kind == "fault":
            time.sleep(0.1)
            raise RuntimeError("a scripted fault of the device")
        time.sleep({"slow": 0.3, "hang": 60.0}.get(self.kind, 0.0))
        return Result(self.step_id, b"", b"", b"")


class ScriptedRunner:
    num_pages, max_seq_len, model_config = 8, 64, SimpleNamespace(vocab_size=96)

    def __init__(self, script: str):
        self._kinds = {int(step): kind for kind, step in (part.split(":") for part in script.split(",") if part)}

    def execute(self, step: Step) -> ScriptedHandle:
        kind = self._kinds.get(step.step_id, "")
        if kind == "raise":
            raise MemoryError("a scripted launch")
        return ScriptedHandle(step.step_id, kind)

    def summary(self) -> str:
        return "scripted"


class ScriptedWorker(Worker):
    def __init__(self, steps: str, results: str, script: str):
        super().__init__(steps, results)
        self._script = script

    def _load(self, configure: Configure) -> ScriptedRunner:
        self._rank = configure.rank
        return ScriptedRunner(self._script)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("--steps", "--results", "--script", "--death-fd"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    sys.exit(ScriptedWorker(arguments.steps, arguments.results, arguments.script).run())
