"""An engine whose scheduler corrupts its own books at one step, as `MINISGL_CORRUPTION` says."""

import os
import sys

import minisgl.engine
from minisgl.protocol import Result
from minisgl.scheduler.request import StepOutputs
from minisgl.scheduler.scheduler import Scheduler

AT_STEP = 3


class CorruptedScheduler(Scheduler):
    def complete(self, result: Result) -> StepOutputs:
        outputs = super().complete(result)
        if result.step_id == AT_STEP:
            pool = self._memory.pool
            match os.environ["MINISGL_CORRUPTION"]:
                case "lost":
                    pool.allocate(1)
                case "released_without_owner":
                    pool.release(pool.free_ids[-1:].copy())
                case "free_twice":
                    pool._free_ids[0] = pool._free_ids[1]
        return outputs


if __name__ == "__main__":
    minisgl.engine.Scheduler = CorruptedScheduler  # type: ignore[misc]
    sys.exit(minisgl.engine.main())
