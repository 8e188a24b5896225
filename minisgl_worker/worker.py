"""The worker process: receives Steps, runs them, answers with Results.

The main thread owns the `steps` channel and launches; it never waits for the device. The result thread owns the
`results` channel: it waits for each step's tokens in order, sends them, and in between shows that the process lives
(Heartbeat) and that the main loop turns (its counter). Any exception is fail-stop: Failed, then exit.
"""

import json
import logging
import os
import queue
import signal
import threading
import traceback
from typing import TYPE_CHECKING

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.errors import EXIT_CHILD_DIED, EXIT_START, ModelLoadError, ProtocolMismatch
from minisgl.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Control,
    Failed,
    Heartbeat,
    Message,
    Ready,
    Step,
    Stop,
    Stopped,
)
from minisgl.transport import PairChannel, make_context

if TYPE_CHECKING:  # at run time these come after the first message: torch takes seconds to import
    from minisgl_worker.model_runner import ModelRunner, StepHandle

HEARTBEAT_S = 0.5

logger = logging.getLogger(__name__)


class Worker:
    """One rank, from its first message to its exit code."""

    def __init__(self, steps_address: str, results_address: str):
        self._context = make_context()
        self._steps = PairChannel(self._context, steps_address, bind=False)
        self._outbox: queue.SimpleQueue[Message | StepHandle | None] = queue.SimpleQueue()
        self._num_handled = 0
        self._rank = 0
        self._step_id: int | None = None
        self._sender = threading.Thread(target=self._send_results, args=(results_address,), name="results", daemon=True)

    def run(self) -> int:
        """Serve until Stop; returns the process's exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when a worker ends
        self._sender.start()
        try:
            self._serve()
            code, last = 0, Stopped(self._rank)
        except Exception as error:  # the process edge: any fault becomes a message and an exit
            logger.error("rank %d failed in step %s:\n%s", self._rank, self._step_id, traceback.format_exc())
            code = EXIT_START if isinstance(error, (ModelLoadError, ProtocolMismatch)) else EXIT_CHILD_DIED
            last = Failed(self._step_id, self._rank, type(error).__name__, str(error)[:4000])
        self._outbox.put(last)
        self._outbox.put(None)
        self._sender.join()
        self._steps.close()
        self._context.destroy()
        return code

    def _serve(self) -> None:
        configure = self._steps.receive(None)
        if not isinstance(configure, Configure):
            raise ProtocolMismatch(f"expected Configure first, got {type(configure).__name__}")
        runner = self._load(configure)
        self._num_handled += 1
        while True:
            message = self._steps.receive(None)
            match message:
                case Step():
                    self._step_id = message.step_id
                    self._outbox.put(runner.execute(message))
                case Control():
                    pass  # a probe: being counted is the answer
                case Stop():
                    return
                case _:
                    raise ProtocolMismatch(f"{type(message).__name__} is not for a worker")
            self._num_handled += 1

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

        runner = ModelRunner(config, configure.rank, configure.rendezvous)
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
        return runner

    def _send_results(self, address: str) -> None:
        """The result thread: everything in `_outbox` in order, and heartbeats while there is nothing."""
        channel = PairChannel(self._context, address, bind=False)
        try:
            while True:
                try:
                    item = self._outbox.get(timeout=HEARTBEAT_S)
                except queue.Empty:
                    channel.send(Heartbeat(self._num_handled))
                    continue
                if item is None:
                    return
                channel.send(item.result() if hasattr(item, "result") else item)
        except Exception as error:  # the process edge: a step whose result cannot be had or sent ends the worker
            logger.error("rank %d lost the results of a step:\n%s", self._rank, traceback.format_exc())
            channel.send(Failed(self._step_id, self._rank, type(error).__name__, str(error)[:4000]))
            channel.close()
            os._exit(EXIT_CHILD_DIED)  # the main thread may be inside a long launch
        finally:
            channel.close()
