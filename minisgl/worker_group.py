"""The engine's workers: starting them, the two channels to each, and noticing at once when one is not well."""

import json
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.errors import EXIT_CHILD_DIED, EXIT_STALLED, EngineDead, EngineStartError, ModelLoadError, PeerLost
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Control,
    ControlAction,
    Digest,
    Failed,
    Heartbeat,
    Message,
    Ready,
    Result,
    Step,
    Stop,
    Stopped,
    encode,
)
from minisgl.supervisor import ChildProcess, place_workers, spawn
from minisgl.transport import ChannelBlocked, Context, PairChannel, Pollable

SILENT_S = 3.5  # without a heartbeat (one each half second), a worker counts as frozen
STARTING_SILENT_S = 20.0  # the same before it is ready: imports can hold a busy machine's interpreter for seconds
LATE_S = 1.0  # a check that comes this late shows that we were paused ourselves: nobody is judged by it
PROBE_INTERVAL_S = 1.0  # while idle, how often to see whether the main loops turn
STOP_GRACE_S = 5.0
PEER_CAUSE_S = 2.0  # after a rank has lost another, how long to look for what became of that one
LAST_WORDS_S = 0.5  # after a channel has no reader any more, how long its process may take to end
STACKS_S = 0.3  # for a stuck worker to write where it stands


class WorkerFault(EngineDead):
    """A worker is dead, stuck or wrong: the engine ends. `exit_code` is the engine's own."""

    def __init__(self, text: str, exit_code: int = EXIT_CHILD_DIED):
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Worker:
    rank: int
    process: ChildProcess
    steps: PairChannel
    results: PairChannel
    last_heard: float
    num_handled: int = 0
    last_progress: float = 0.0
    num_collectives: int = 0
    configure: bytes | None = None  # its first message, until it is connected and can take it
    ready: Ready | None = None
    has_stopped: bool = False
    peer_lost: Failed | None = None  # it ended because another rank did

    @property
    def is_over(self) -> bool:
        """Nothing more comes from it, for a reason that is known."""
        return self.has_stopped or self.peer_lost is not None


class WorkerGroup:
    """One worker per rank. Used by the engine's main thread only.

    Every method that talks to workers raises WorkerFault when one of them is not well.
    """

    def __init__(self, config: EngineConfig, module: str, folder: Path, context: Context):
        self._config, self._module, self._folder, self._context = config, module, folder, context
        self._workers: list[_Worker] = []
        self._num_sent = 0
        self._next_step = 0  # whose Result comes next
        self._digests: dict[int, dict[int, int]] = {}  # step -> rank -> digest, until all ranks have sent theirs
        self._peer_lost_at = 0.0
        self._last_check = self._last_probe = time.monotonic()
        self._recording: BinaryIO | None = None
        if config.record_steps:
            self._recording = Path(config.record_steps).open("wb")  # noqa: SIM115, closed in `end`

    def start(self) -> None:
        """Start every rank and send it its configuration; `is_ready` tells when all are there."""
        config_json = json.dumps(self._config.to_wire())
        for place in place_workers(self._folder, self._config.tp_size):
            steps, results = (
                PairChannel(self._context, address, bind=True) for address in (place.steps, place.results)
            )
            process = spawn(self._module, ["--steps", place.steps, "--results", place.results], with_status=False)
            configure = encode(Configure(PROTOCOL_VERSION, __version__, place.rank, config_json, place.rendezvous))
            now = time.monotonic()
            self._workers.append(
                _Worker(place.rank, process, steps, results, now, last_progress=now, configure=configure)
            )
            if place.rank == 0:
                self._record(configure)
        self._num_sent = 1

    @property
    def pollables(self) -> list[Pollable]:
        """What to wait for: every results channel, and every process's end."""
        pidfds = [worker.process.pidfd for worker in self._workers if worker.process.pidfd is not None]
        return [*(worker.results.pollable for worker in self._workers), *pidfds]

    @property
    def is_ready(self) -> bool:
        return all(worker.ready is not None for worker in self._workers)

    @property
    def has_stopped(self) -> bool:
        return all(worker.has_stopped for worker in self._workers)

    def describe_missing(self) -> str:
        """The ranks that are not ready and that nobody waits for, for the error of a start that took too long."""
        return _name_ranks(_find_hindmost([worker for worker in self._workers if worker.ready is None]))

    def get_ready(self) -> Ready:
        """What the group as a whole offers: rank 0's words, with the smallest pool."""
        states = [worker.ready for worker in self._workers]
        first = states[0]
        assert first is not None
        num_pages = min(ready.num_pages for ready in states if ready is not None)
        return Ready(first.rank, num_pages, first.vocab_size, first.max_seq_len, first.protocol_version,
                     first.package_version, first.summary)  # fmt: skip

    def send(self, message: Step | Control | Stop) -> None:
        """The same bytes to every rank."""
        frame = encode(message)
        for worker in self._workers:
            if self._num_sent == worker.num_handled:
                worker.last_progress = time.monotonic()  # it was idle: its time begins now
            try:
                worker.steps.send_frame(frame)
            except ChannelBlocked:
                self._explain_block(worker)
        self._num_sent += 1
        self._record(frame)

    @property
    def is_connected(self) -> bool:
        """Whether every worker has its configuration; until then `receive` is to be called often."""
        return all(worker.configure is None for worker in self._workers)

    def receive(self) -> list[Result]:
        """The results that have come, in order; takes note of everything else that workers say."""
        results = []
        for worker in self._workers:
            self._configure(worker)
            while (message := worker.results.receive()) is not None:
                worker.last_heard = time.monotonic()
                result = self._take(worker, message)
                if result is not None:
                    results.append(result)
        return results

    def check(self, now: float) -> None:
        """Judge every worker: its process, its heartbeat, the progress of its main loop."""
        for worker in self._workers:
            if worker.process.poll() is not None and not worker.is_over:
                self._explain_end(worker)
        for worker in self._workers:
            if worker.peer_lost is not None and now - self._peer_lost_at > PEER_CAUSE_S:
                raise self._explain_failure(worker.peer_lost)
        if now - self._last_check > LATE_S:
            for worker in self._workers:
                worker.last_heard = worker.last_progress = now
        self._last_check = now
        for worker in self._workers:
            if worker.is_over:
                continue
            if now - worker.last_heard > (STARTING_SILENT_S if worker.ready is None else SILENT_S):
                raise WorkerFault(
                    f"worker rank {worker.rank} is frozen: silent for {now - worker.last_heard:.1f} s", EXIT_STALLED
                )
            is_busy = worker.ready is not None and worker.num_handled < self._num_sent
            if is_busy and now - worker.last_progress > self._config.step_timeout_s:
                self._explain_stuck(now - worker.last_progress)

    def probe(self, now: float) -> None:
        """While there is no work: see now and then whether the main loops turn."""
        if now - self._last_probe >= PROBE_INTERVAL_S and all(w.num_handled == self._num_sent for w in self._workers):
            self._last_probe = now
            self.send(Control(ControlAction.PROBE))

    def end(self) -> None:
        """End every process, now, however it is. Idempotent."""
        for worker in self._workers:
            if worker.has_stopped:
                worker.process.stop(STOP_GRACE_S)
            else:
                worker.process.kill()
            worker.steps.close()
            worker.results.close()
        self._workers.clear()
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def _configure(self, worker: _Worker) -> None:
        """Send the configuration as soon as the worker has connected: a PAIR without a peer takes nothing."""
        if worker.configure is not None:
            try:
                worker.steps.send_frame(worker.configure)
                worker.configure = None
            except ChannelBlocked:
                pass

    def _take(self, worker: _Worker, message: Message) -> Result | None:
        match message:
            case Result():
                if worker.rank != 0 or message.step_id != self._next_step:
                    raise WorkerFault(
                        f"worker rank {worker.rank} answered step {message.step_id}, expected step {self._next_step} "
                        "from rank 0"
                    )
                self._next_step += 1
                return message
            case Heartbeat():
                worker.num_collectives = message.num_collectives
                if message.num_handled != worker.num_handled:
                    worker.num_handled, worker.last_progress = message.num_handled, time.monotonic()
            case Ready():
                if (message.protocol_version, message.package_version) != (PROTOCOL_VERSION, __version__):
                    raise WorkerFault(
                        f"worker rank {worker.rank} is version {message.package_version} (protocol "
                        f"{message.protocol_version}), the engine is {__version__} (protocol {PROTOCOL_VERSION})"
                    )
                worker.ready, worker.last_progress = message, time.monotonic()  # loading took what it took
            case Digest():
                self._compare(worker.rank, message)
            case Failed() if message.kind == PeerLost.__name__ and len(self._workers) > 1:
                worker.peer_lost, self._peer_lost_at = message, time.monotonic()
            case Failed():
                raise self._explain_failure(message)
            case Stopped():
                worker.has_stopped = True
            case _:
                raise WorkerFault(f"worker rank {worker.rank} sent a {type(message).__name__}")
        return None

    def _compare(self, rank: int, digest: Digest) -> None:
        """Every rank must have drawn the same tokens."""
        digests = self._digests.setdefault(digest.step_id, {})
        digests[rank] = digest.value
        for other, value in digests.items():
            if value != digest.value:
                raise WorkerFault(
                    f"worker rank {rank} has drawn other tokens than rank {other} by step {digest.step_id}"
                )
        if len(digests) == len(self._workers):
            del self._digests[digest.step_id]

    def _explain_failure(self, failed: Failed) -> Exception:
        if not self.is_ready:
            if failed.kind == "ModelLoadError":
                return ModelLoadError(failed.text)
            return EngineStartError(f"worker rank {failed.rank} failed: {failed.kind}: {failed.text}")
        where = "" if failed.step_id is None else f" in step {failed.step_id}"
        return WorkerFault(f"worker rank {failed.rank} failed{where}: {failed.kind}: {failed.text}")

    def _explain_end(self, worker: _Worker) -> None:
        """A process is gone: raise its last words if it left any, else how it ended."""
        while (message := worker.results.receive(0.05)) is not None:
            self._take(worker, message)
        if not worker.is_over:
            text = f"worker rank {worker.rank} ended: {worker.process.describe_exit()}"
            raise WorkerFault(text) if self.is_ready else EngineStartError(text)

    def _explain_block(self, worker: _Worker) -> None:
        """A channel takes nothing: its process is about to end, which says more, or it has stopped reading."""
        deadline = time.monotonic() + LAST_WORDS_S
        while worker.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if worker.process.poll() is None:
            raise WorkerFault(f"worker rank {worker.rank} has stopped reading", EXIT_STALLED)
        if not worker.is_over:
            self._explain_end(worker)

    def _explain_stuck(self, seconds: float) -> None:
        """Of ranks that stand still, some only wait for others; those others are named, and write where they stand."""
        stuck = [worker for worker in self._workers if not worker.is_over and worker.num_handled < self._num_sent]
        for worker in stuck:
            worker.process.request_stacks()
        time.sleep(STACKS_S)
        raise WorkerFault(
            f"worker rank {_name_ranks(_find_hindmost(stuck))} is stuck: no step finished for {seconds:.1f} s, "
            f"limit {self._config.step_timeout_s:g} s (step_timeout_s)",
            EXIT_STALLED,
        )

    def _record(self, frame: bytes) -> None:
        if self._recording is not None:
            self._recording.write(struct.pack("<I", len(frame)) + frame)


def _find_hindmost(workers: list[_Worker]) -> list[_Worker]:
    """Those that have entered the fewest exchanges: whoever has entered one more waits for them."""
    fewest = min((worker.num_collectives for worker in workers), default=0)
    return [worker for worker in workers if worker.num_collectives == fewest]


def _name_ranks(workers: list[_Worker]) -> str:
    return ", ".join(str(worker.rank) for worker in workers)
