"""The parent's side of supervision: starting child processes, learning that they are ready, and ending them.

Children are plain subprocesses in sessions of their own, so that Ctrl-C reaches the parent alone. They end with the
parent by a pipe (see `lifeline`), report that they are ready by another, and are watched through a pidfd.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl import errors
from minisgl.errors import EngineStartError, MinisglError
from minisgl.lifeline import STACKS_SIGNAL

FOLDER_PREFIX = "minisgl-"
STALE_AFTER_S = 60.0  # a folder this old that nobody holds has lost its owner
KILL_WAIT_S = 4.0


class ChildProcess:
    """A running child. Belongs to the process that started it."""

    def __init__(self, module: str, process: "subprocess.Popen[bytes]", death_fd: int, status_fd: int | None):
        self.module = module
        self._process = process
        self._death_fd = death_fd
        self._status_fd = status_fd
        self.pidfd = _open_pidfd(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal), or None while it runs."""
        return self._process.poll()

    def request_stacks(self) -> None:
        """Have a worker write the stacks of its threads to stderr, if it still can."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACKS_SIGNAL)

    def wait_ready(self, timeout_s: float) -> dict[str, object]:
        """What the child reported when it became ready.

        Raises:
            EngineStartError, ModelLoadError, ...: the child's own error; or it ended, or said nothing in time.
        """
        assert self._status_fd is not None, "this child was started without a status pipe"
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._status_fd], [], [], left_s)[0]:
                raise EngineStartError(f"{self.module} was not ready within {timeout_s:g} s")
            chunk = os.read(self._status_fd, 65_536)
            if not chunk:
                self._wait(KILL_WAIT_S)
                raise EngineStartError(f"{self.module} ended before it was ready: {self.describe_exit()}")
            line += chunk
        status: dict[str, object] = json.loads(line)
        if "error" in status:
            kind = getattr(errors, str(status["kind"]), EngineStartError)
            if not (isinstance(kind, type) and issubclass(kind, MinisglError)):
                kind = EngineStartError
            raise kind(str(status["error"]))
        return status

    def describe_exit(self) -> str:
        """How it ended, for people."""
        code = self.poll()
        if code is None:
            return "still running"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stop(self, grace_s: float) -> None:
        """End the child and wait for its end: SIGTERM, `grace_s` later the closed pipe and SIGKILL. Idempotent."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            if not self._wait(grace_s):
                self.kill()
        self._close()

    def kill(self) -> None:
        """End the child at once; it has no say. Its own children end with it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._wait(KILL_WAIT_S)
        self._close()

    def _wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _close(self) -> None:
        for fd in (self._death_fd, self._status_fd, self.pidfd):
            if fd is not None:
                os.close(fd)
        self._death_fd, self._status_fd, self.pidfd = None, None, None  # type: ignore[assignment]


def spawn(module: str, arguments: Sequence[str], *, with_status: bool = True) -> ChildProcess:
    """Start `python -m module arguments`; it also gets `--death-fd` and, with a status pipe, `--status-fd`.

    Its stdin is empty, its stdout goes to our stderr, so that a program's own output stays clean.
    """
    death_read, death_write = os.pipe()
    status_read, status_write = os.pipe() if with_status else (None, None)
    command = [sys.executable, "-P", "-m", module, *arguments, "--death-fd", str(death_read)]
    inherited = [death_read]
    if status_write is not None:
        command += ["--status-fd", str(status_write)]
        inherited.append(status_write)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=_stderr_or_null(),
            pass_fds=inherited,
            start_new_session=True,
            env=_child_environment(),
        )
    except OSError as error:
        os.close(death_write)
        if status_read is not None:
            os.close(status_read)
        raise EngineStartError(f"cannot start {module}: {error}") from None
    finally:
        for fd in inherited:
            os.close(fd)
    return ChildProcess(module, process, death_write, status_read)


def report_ready(status_fd: int | None, status: dict[str, object]) -> None:
    """Child: tell the parent that we are ready. Without a pipe, or once the parent is gone, nobody is told."""
    _report(status_fd, status)


def report_error(status_fd: int | None, error: Exception) -> None:
    """Child: tell the parent why we end before we were ready."""
    _report(status_fd, {"error": str(error) or type(error).__name__, "kind": type(error).__name__})


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """How one rank's worker is reached, and where it meets the others. All that says where the workers run."""

    rank: int
    steps: str  # address of its channel, as `results`
    results: str
    rendezvous: str  # file:// URL, the same for all ranks; empty for one


def place_workers(folder: Path, num_ranks: int) -> list[WorkerPlace]:
    """The places of workers on this machine, with all that they share in one private folder."""
    rendezvous = f"file://{folder}/rendezvous" if num_ranks > 1 else ""
    return [
        WorkerPlace(rank, f"ipc://{folder}/steps{rank}", f"ipc://{folder}/results{rank}", rendezvous)
        for rank in range(num_ranks)
    ]


class PrivateFolder:
    """A new folder that only this user can enter; making one also removes those of owners that were killed.

    A lock, held until `remove` or this process's end, marks the folder as in use.
    """

    def __init__(self) -> None:
        _remove_stale_folders()
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._lock_fd: int | None = os.open(self.path / "owner", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder and all in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _report(status_fd: int | None, status: dict[str, object]) -> None:
    if status_fd is not None:
        # Stays open: a second report would otherwise write to, and close, whatever got the number since.
        with contextlib.suppress(BrokenPipeError):
            os.write(status_fd, json.dumps(status).encode() + b"\n")


def _remove_stale_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"):
        try:
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < STALE_AFTER_S:
                continue
            lock = os.open(folder / "owner", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
        except OSError:  # in use, or not ours to judge
            continue


def _child_environment() -> dict[str, str]:
    """Ours, with the place of this very package at the end of the search path, whatever the working folder is."""
    root = str(Path(__file__).resolve().parent.parent)
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, root])}


def _stderr_or_null() -> int:
    try:
        os.fstat(2)
    except OSError:  # closed: a daemon
        return subprocess.DEVNULL
    return 2


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
