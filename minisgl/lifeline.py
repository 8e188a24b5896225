"""The child's side of supervision: a child ends when its parent does, however the parent ends.

The parent keeps the write end of a pipe open for as long as it lives; the kernel closes it even after SIGKILL. The read
end is watched by a thread that ends the process at once.
"""

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1  # from the parent to a worker that does not move: write all threads' stacks to stderr

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def watch_parent(death_fd: int, *, remove: Sequence[Path] = (), kill_at_parents_end: bool = False) -> None:
    """End this process as soon as the parent is gone. To be called first of all in a child's `main`.

    Args:
        death_fd: read end of the pipe whose other end the parent holds.
        remove: folders to remove before the end.
        kill_at_parents_end: let the kernel kill us too, as a thread cannot run while native code holds the interpreter.
            Only where the parent's *thread* that started us lives as long as the parent: the kernel watches the thread.
    """
    parent = os.getppid()
    threading.Thread(target=_wait_for_end, args=(death_fd, tuple(remove)), name="lifeline", daemon=True).start()
    if kill_at_parents_end and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended between the two lines above
            os._exit(1)


def _wait_for_end(death_fd: int, remove: tuple[Path, ...]) -> None:
    os.read(death_fd, 1)  # returns when the last write end is closed
    for folder in remove:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
