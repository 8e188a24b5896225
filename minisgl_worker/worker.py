"""The worker process: receives Steps, runs them, answers with Results.

Three threads, so that a slow or hung device neither stops the launching nor looks like a dead process:

    main       owns the `steps` channel and launches; it never waits for the device
    outcomes   waits for the device, step by step
    results    owns the `results` channel: sends what comes, and a Heartbeat every half second whatever else happens

Any exception is fail-stop: Failed with the step that it belongs to, then the process ends, whatever the others do.
"""

import json
import logging
import os
import queue
import signal
import threading
import time
import traceback
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.errors import EXIT_CHILD_DIED, EXIT_START, MinisglError, ModelLoadError, ProtocolMismatch
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Control,
    Digest,
    Failed,
    Heartbeat,
    Message,
    Ready,
    Result,
    Step,
    Stop,
    Stopped,
)
from minisgl.transport import PairChannel, make_context

if TYPE_CHECKING:  # at run time these come after the first message: torch takes seconds to import
    from minisgl_worker.model_runner import ModelRunner, StepHandle
    from minisgl_worker.parallel import ParallelGroup

HEARTBEAT_S = 0.5
DIGEST_INTERVAL = 64  # steps
MAX_ERROR_CHARACTERS = 4000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing that the results thread sends."""

    last_words: Stopped | Failed
    exit_code: int


class Worker:
    """One rank, from its first message to its exit code. `run` is for the main thread of a process.

    Args:
        digest_interval: after how many steps the ranks compare their tokens.
    """

    def __init__(self, steps_address: str, results_address: str, digest_interval: int = DIGEST_INTERVAL):
        self._context = make_context()
        self._steps = PairChannel(self._context, steps_address, bind=False)
        self._results_address = results_address
        self._rank = 0
        self._group: ParallelGroup | None = None  # once configured
        self._digest, self._digest_interval = 0, digest_interval
        self._step_id: int | None = None  # of the step that the main thread is at
        self._num_handled = 0  # written by the outcomes thread alone
        # Handles of launched steps; None = a message that was done with when it was put there; Stop = no more.
        self._launched: queue.SimpleQueue[StepHandle | Stop | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Message | _End] = queue.SimpleQueue()

    def run(self) -> int:
        """Serve until Stop; returns 0. A failure ends the process with its exit code instead."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when a worker ends
        threading.Thread(target=self._take_outcomes, name="outcomes", daemon=True).start()
        results = threading.Thread(target=self._send_results, name="results", daemon=True)
        results.start()
        try:
            self._serve()
        except Exception as error:  # the process edge: any fault becomes a message and an exit
            self._fail(error, self._step_id)
        results.join()
        self._steps.close()
        self._context.destroy()
        if self._group is not None and self._group.size > 1:
            os._exit(0)  # taking an exchange down in order may wait for ever; the system does it at once
        return 0

    def _serve(self) -> None:
        configure = self._steps.receive(None)
        if not isinstance(configure, Configure):
            raise ProtocolMismatch(f"expected Configure first, got {type(configure).__name__}")
        runner = self._load(configure)
        self._outbox.put(
            Ready(
                rank=configure.rank,
                num_pages=runner.num_pages,
                vocab_size=runner.model_config.vocab_size,
                max_seq_len=runner.max_seq_len,
                protocol_version=PROTOCOL_VERSION,
                package_version=__version__,
                summary=runner.summary(),
            )
        )
        self._launched.put(None)
        while True:
            message = self._steps.receive(None)
            match message:
                case Step():
                    self._step_id = message.step_id
                    self._launched.put(runner.execute(message))
                    self._step_id = None
                case Control():
                    self._launched.put(None)  # a probe: being counted is the answer
                case Stop():
                    if self._group is not None:
                        self._group.wait_for_all(runner.device)  # they may still read from this one's memory
                    self._launched.put(message)
                    return
                case _:
                    raise ProtocolMismatch(f"{type(message).__name__} is not for a worker")

    def _load(self, configure: Configure) -> "ModelRunner":
        self._rank = configure.rank
        if (configure.protocol_version, configure.package_version) != (PROTOCOL_VERSION, __version__):
            raise ProtocolMismatch(
                f"the engine is version {configure.package_version} (protocol {configure.protocol_version}), "
                f"this worker is {__version__} (protocol {PROTOCOL_VERSION})"
            )
        config = EngineConfig.from_wire(json.loads(configure.config_json))
        # Deferred: torch takes seconds to import, and by now the engine sees heartbeats.
        from minisgl_worker.model_runner import ModelRunner
        from minisgl_worker.parallel import ParallelGroup, share_cpu_threads

        share_cpu_threads(config.tp_size)
        self._group = ParallelGroup(configure.rank, config.tp_size)
        return ModelRunner(config, self._group, configure.rendezvous)

    def _take_outcomes(self) -> None:
        """The outcomes thread: what was launched, in order. Rank 0 speaks for all, the others just take part."""
        handle = None
        try:
            while not isinstance(handle := self._launched.get(), Stop):
                if handle is not None:
                    result = handle.result()
                    if self._rank == 0:
                        self._outbox.put(result)
                    self._note_tokens(result)
                self._num_handled += 1
            self._outbox.put(_End(Stopped(self._rank), 0))
        except Exception as error:  # the process edge; a fault of the device comes to light here
            self._fail(error, handle.step_id)

    def _note_tokens(self, result: Result) -> None:
        """Let the engine see now and then whether all ranks draw the same."""
        if self._group is None or self._group.size == 1:
            return
        self._digest = zlib.crc32(result.tokens, self._digest)
        if (result.step_id + 1) % self._digest_interval == 0:
            self._outbox.put(Digest(result.step_id, self._digest))

    def _send_results(self) -> None:
        """The results thread: everything in the outbox, in order, between punctual heartbeats."""
        try:
            context = make_context()  # its own, since destroying it is what waits for the last message to leave
            channel = PairChannel(context, self._results_address, bind=False)
            next_beat = time.monotonic()
            while True:
                try:
                    item = self._outbox.get(timeout=max(0.0, next_beat - time.monotonic()))
                except queue.Empty:
                    item = None
                if isinstance(item, _End):
                    break
                if item is not None:
                    channel.send(item)
                if time.monotonic() >= next_beat:
                    channel.send(Heartbeat(self._num_handled, self._group.num_collectives if self._group else 0))
                    next_beat = time.monotonic() + HEARTBEAT_S
            channel.send(item.last_words)
            context.destroy()
        except Exception:  # the process edge: nobody would hear from this worker again
            logger.error("rank %d cannot send its results:\n%s", self._rank, traceback.format_exc())
            os._exit(EXIT_CHILD_DIED)
        if item.exit_code:
            os._exit(item.exit_code)  # the main thread may be inside a launch that never returns

    def _fail(self, error: Exception, step_id: int | None) -> None:
        """Have Failed sent and the process ended. To be called while the exception is handled."""
        if not isinstance(error, MinisglError):  # the others' text is all there is to tell, and the engine tells it
            where = "" if step_id is None else f" in step {step_id}"
            logger.error("rank %d failed%s:\n%s", self._rank, where, traceback.format_exc())
        code = EXIT_START if isinstance(error, (ModelLoadError, ProtocolMismatch)) else EXIT_CHILD_DIED
        failed = Failed(step_id, self._rank, type(error).__name__, str(error)[:MAX_ERROR_CHARACTERS])
        self._outbox.put(_End(failed, code))
