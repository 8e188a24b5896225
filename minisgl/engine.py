"""The engine process: `python -m minisgl.engine --model M --address A`.

Each turn of its loop drains the sockets, completes the results that have come, schedules and sends new steps, and only
then speaks to frontends. Any fault of a worker ends the engine: it tells every frontend the cause, ends every process,
and exits with a code that names the kind (see `errors`).
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

from minisgl import __version__
from minisgl.config import EngineConfig, add_engine_flags, read_engine_flags
from minisgl.errors import (
    EXIT_ADDRESS,
    EXIT_CHILD_DIED,
    EXIT_INTEGRITY,
    EXIT_START,
    EXIT_USAGE,
    AddressInUse,
    EngineStartError,
    MinisglError,
    ModelLoadError,
)
from minisgl.frontends import Frontends
from minisgl.lifeline import watch_parent
from minisgl.model_folder import resolve_model
from minisgl.protocol import Ready, Stats, Stop, Welcome
from minisgl.requirements import check_options
from minisgl.scheduler.page_pool import IntegrityError
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig
from minisgl.supervisor import PrivateFolder, report_error, report_ready
from minisgl.transport import Readiness, ServerChannel, Waker, check_address, make_context
from minisgl.worker_group import WorkerFault, WorkerGroup

TURN_S = 0.25  # how often the health of workers and frontends is judged, at least
CONNECT_POLL_S = 0.02  # while workers are connecting, which nothing announces
DRAIN_LIMIT_S = 30.0  # after SIGTERM, for requests to finish
STOP_LIMIT_S = 10.0  # after Stop, for workers to finish their queue
SPEED_WINDOW_S = 5.0
NUM_NAMED = 5  # stray files in a line of the log
WORKER_MODULE = "minisgl_worker"

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """A signal asked the engine to end before it was ready, or for the second time."""


class Engine:
    """From the address to the exit. The main thread does everything.

    Args:
        folder: private folder for the workers' sockets.
        worker_module: run as `python -m worker_module`, one process per rank.
    """

    def __init__(self, config: EngineConfig, address: str, folder: Path, worker_module: str = WORKER_MODULE):
        self._config = config
        self._num_signals = 0
        self._waker = Waker()
        self._catch_signals()
        self._context = make_context()
        self._channel = ServerChannel(self._context, address)
        self.address = self._channel.address
        try:
            model = resolve_model(config.model, need_weights=not config.use_dummy_weight)
            if model.stray_files:  # one line, by the one process that there always is
                files = ", ".join(model.stray_files[:NUM_NAMED])
                logger.warning("%s: ignored, as they are no part of the model: %s", model.path, files)
            check_options(config, model.config)
            self._workers = WorkerGroup(config, worker_module, folder, self._context)
        except BaseException:
            self._channel.close()
            raise
        self._frontends: Frontends | None = None
        self._checked_steps = self._num_leaked_pages = 0
        self._speed: deque[tuple[float, int]] = deque()  # (time, output tokens so far)

    def start(self) -> Ready:
        """Start the workers and wait until all are ready.

        Raises:
            ModelLoadError, EngineStartError: a worker's own error, its end, or its silence.
            Interrupted: a signal came first.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        self._workers.start()
        self._readiness = Readiness([self._channel.pollable, self._waker.pollable, *self._workers.pollables])
        waiting = Readiness([self._waker.pollable, *self._workers.pollables])  # frontends are heard later
        while not self._workers.is_ready:
            waiting.wait(TURN_S if self._workers.is_connected else CONNECT_POLL_S)
            self._waker.clear()
            if self._num_signals:
                raise Interrupted
            self._workers.receive()
            self._workers.check(time.monotonic())
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"worker rank {self._workers.describe_missing()} was not ready within "
                    f"{self._config.start_timeout_s:g} s (start_timeout_s)"
                )
        ready = self._workers.get_ready()
        limit = min(ready.max_seq_len, ready.num_pages * self._config.page_size)
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_pages=ready.num_pages,
                page_size=self._config.page_size,
                max_running_req=self._config.max_running_req,
                max_extend_tokens=self._config.max_extend_tokens,
                context_limit_tokens=limit,
                vocab_size=ready.vocab_size,
                max_steps_in_flight=self._config.max_steps_in_flight,
                cache_type=self._config.cache_type,
                schedule_policy=self._config.schedule_policy,
                max_queued_req=self._config.max_queued_req,
            )
        )
        welcome = Welcome(
            epoch=secrets.randbits(64),
            model=str(Path(self._config.model).resolve()) if Path(self._config.model).exists() else self._config.model,
            vocab_size=ready.vocab_size,
            context_limit_tokens=limit,
            page_size=self._config.page_size,
            num_pages=ready.num_pages,
            window=max(16, self._config.max_queued_req // 4),
            base_seed=self._config.seed % 2**64,
        )
        self._frontends = Frontends(self._channel, self._scheduler, welcome, self._get_stats)
        logger.info("ready at %s: %s", self.address, ready.summary)
        return ready

    def serve(self) -> None:
        """Run until a signal asks to end and all requests are done. Raises WorkerFault, IntegrityError, Interrupted."""
        drain_until: float | None = None
        while True:
            self._turn()
            if self._num_signals > 1:
                raise Interrupted
            if self._num_signals and drain_until is None:
                drain_until = time.monotonic() + DRAIN_LIMIT_S
                assert self._frontends is not None
                self._frontends.is_draining = True
            if drain_until is not None and (not self._scheduler.has_work or time.monotonic() > drain_until):
                break
        self._stop_workers()

    def close(self, reason: str | None = None) -> None:
        """Tell frontends why, end every worker, free the address. Idempotent."""
        if reason is not None and self._frontends is not None:
            self._frontends.fail_all(reason)
        self._workers.end()
        self._channel.close()
        self._waker.close()
        self._context.destroy()

    def _turn(self) -> None:
        """Drain, complete, schedule and send; then speak to frontends."""
        frontends = self._frontends
        assert frontends is not None
        self._readiness.wait(TURN_S)
        self._waker.clear()
        for result in self._workers.receive():
            frontends.route(self._scheduler.complete(result))
        now = time.monotonic()
        frontends.receive(now)
        while (step := self._scheduler.schedule(now)) is not None:
            self._workers.send(step)
        frontends.flush()
        self._workers.check(now)
        frontends.check(now)
        self._note_speed(now)
        if not self._scheduler.has_work:
            self._workers.probe(now)
            self._check_integrity()

    def _stop_workers(self) -> None:
        """Abort what is left, wait for the steps in flight, and let the workers finish."""
        assert self._frontends is not None
        self._frontends.abort_all()
        deadline = time.monotonic() + STOP_LIMIT_S
        while self._scheduler.num_in_flight and time.monotonic() < deadline:
            self._turn()
        self._workers.send(Stop())
        while not self._workers.has_stopped and time.monotonic() < deadline:
            self._readiness.wait(TURN_S)
            self._workers.receive()
            self._workers.check(time.monotonic())
            if self._num_signals > 1:
                raise Interrupted
        self._frontends.flush()

    def _check_integrity(self) -> None:
        """Between bursts of work the books must balance; a leak is told once, anything worse ends the engine."""
        num_steps = self._scheduler.stats().num_steps
        if num_steps == self._checked_steps:
            return
        self._checked_steps = num_steps
        num_leaked = self._scheduler.check_integrity()
        if num_leaked > self._num_leaked_pages:
            logger.error("%d KV pages leaked after %d steps", num_leaked, num_steps)
            self._num_leaked_pages = num_leaked

    def _get_stats(self) -> Stats:
        stats = self._scheduler.stats()
        return Stats(
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_draining=stats.num_draining,
            num_pages_free=stats.num_pages_free,
            num_pages_cached=stats.num_pages_cached,
            num_pages_used=stats.num_pages_used,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            tokens_per_s=self._get_speed(stats.output_tokens),
        )

    def _note_speed(self, now: float) -> None:
        if not self._speed or now - self._speed[-1][0] > SPEED_WINDOW_S / 10:
            self._speed.append((now, self._scheduler.stats().output_tokens))
            while now - self._speed[0][0] > SPEED_WINDOW_S:
                self._speed.popleft()

    def _get_speed(self, output_tokens: int) -> float:
        if not self._speed:
            return 0.0
        since, tokens = self._speed[0]
        return (output_tokens - tokens) / max(time.monotonic() - since, 1e-3)

    def _catch_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._num_signals += 1
            self._waker.wake()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal does not end a detached engine


def run(config: EngineConfig, address: str, folder: Path, status_fd: int | None, worker_module: str) -> int:
    """Run an engine; returns the exit code."""
    engine: Engine | None = None
    try:
        engine = Engine(config, address, folder, worker_module)
        ready = engine.start()
        _announce(engine.address, config, ready, status_fd)
        engine.serve()
        engine.close()
        return 0
    except Interrupted:
        if engine is not None:
            engine.close("the engine was told to end")
        return 130 if engine is not None and engine._frontends is not None else 143
    except Exception as error:  # the process edge: whatever it is, frontends hear of it and every process ends
        is_known = isinstance(error, (MinisglError, IntegrityError))
        text = str(error) if is_known else f"the engine failed: {type(error).__name__}: {error}"
        is_told = is_known and status_fd is not None and (engine is None or engine._frontends is None)  # by our parent
        if not is_told:
            logger.error("%s: %s", type(error).__name__, text, exc_info=not is_known)
        report_error(status_fd, error if is_known else EngineStartError(text))
        if engine is not None:
            engine.close(text)
        return _exit_code(error)


def _exit_code(error: Exception) -> int:
    if isinstance(error, WorkerFault):
        return error.exit_code
    if isinstance(error, AddressInUse):
        return EXIT_ADDRESS
    if isinstance(error, IntegrityError):
        return EXIT_INTEGRITY
    return EXIT_START if isinstance(error, (EngineStartError, ModelLoadError)) else EXIT_CHILD_DIED


def _announce(address: str, config: EngineConfig, ready: Ready, status_fd: int | None) -> None:
    tokens = ready.num_pages * config.page_size
    if status_fd is not None:
        report_ready(status_fd, {"address": address, "summary": ready.summary})
        return
    try:
        print(
            f"minisgl {__version__} serves {config.model} at {address}: {tokens} KV tokens, {ready.summary}", flush=True
        )
    except OSError:  # nobody reads our output, which is no reason to end
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open


def main() -> int:
    parser = argparse.ArgumentParser(prog="minisgl.engine", description="Run an engine that frontends attach to.")
    parser.add_argument("--model", "--model-path", required=True, help="folder, .gguf file, smollm2, or Hub id")
    parser.add_argument("--address", required=True, help="ipc:///path or tcp://127.0.0.1:PORT")
    parser.add_argument("--death-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--status-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker-module", default=WORKER_MODULE, help=argparse.SUPPRESS)
    add_engine_flags(parser)
    arguments = parser.parse_args()
    folder = PrivateFolder()
    try:
        if arguments.death_fd is not None:
            watch_parent(arguments.death_fd, remove=[folder.path])
        logging.basicConfig(level=logging.WARNING, format="minisgl engine: %(levelname)s %(message)s")
        try:
            config = read_engine_flags(arguments.model, arguments)
            check_address(arguments.address)
            return run(config, arguments.address, folder.path, arguments.status_fd, arguments.worker_module)
        except (ValueError, TypeError) as error:
            if isinstance(error, MinisglError):
                raise
            print(f"minisgl engine: {error}", file=sys.stderr)
            report_error(arguments.status_fd, EngineStartError(str(error)))
            return EXIT_USAGE
    finally:
        folder.remove()


if __name__ == "__main__":
    sys.exit(main())
