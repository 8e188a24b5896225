"""A worker without torch, with faults on demand: `MINISGL_FAKE_FAULT` is `kind` or `kind:step`, for all ranks, or
several `kind:step@rank` with commas between them.

Its tokens are a function of the slot's length alone, so they repeat. Kinds: die_loading, fail_loading, bad_model,
never_ready, silent_loading, wrong_version; and at a step: raise, exit0, kill, hang, freeze, wrong_step, repeat,
failed_row, peer_lost, late_raise, late_kill.
"""

import json
import os
import signal
import sys
import threading
import time

import numpy as np

from minisgl import __version__
from minisgl.lifeline import watch_parent
from minisgl.protocol import PROTOCOL_VERSION, Configure, Failed, Heartbeat, Ready, Result, Step, Stop, Stopped
from minisgl.transport import PairChannel, make_context

# Tokens stay below 100; a larger vocabulary lets a tokenizer fit, a longer context lets requests last.
VOCAB_SIZE = int(os.environ.get("MINISGL_FAKE_VOCAB", "100"))
NUM_TOKENS = 100
CONTEXT_TOKENS = int(os.environ.get("MINISGL_FAKE_CONTEXT", "256"))
STEP_S = float(os.environ.get("MINISGL_FAKE_STEP_S", "0.002"))


class FakeWorker:
    def __init__(self, steps: str, results: str):
        context = make_context()
        self.steps = PairChannel(context, steps, bind=False)
        self.results = PairChannel(context, results, bind=False)
        self.lock = threading.Lock()
        self.kind, self.fault_step = "", -1
        self.handled = self.num_collectives = 0
        self.lengths: dict[int, int] = {}
        self.decode: list[int] = []

    def send(self, message: object) -> None:
        with self.lock:
            self.results.send(message)

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.send(Heartbeat(0, 0))
        threading.Thread(target=self.beat, daemon=True).start()
        configure = self.steps.receive(10)
        assert isinstance(configure, Configure)
        rank, config = configure.rank, json.loads(configure.config_json)
        self.take_fault(rank)
        if self.kind == "die_loading":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind in ("fail_loading", "bad_model"):
            self.send(
                Failed(None, rank, "ModelLoadError" if self.kind == "bad_model" else "OSError", "the disk is on fire")
            )
            time.sleep(0.2)
            return 3
        if self.kind == "never_ready":
            time.sleep(60)
        if self.kind == "silent_loading":
            with self.lock:  # no heartbeat gets past
                time.sleep(5)
        version = "9.9" if self.kind == "wrong_version" else __version__
        self.send(Ready(rank, config["num_pages"] or 64, VOCAB_SIZE, CONTEXT_TOKENS, PROTOCOL_VERSION, version, "fake"))
        self.handled = 1
        while not isinstance(message := self.steps.receive(None), Stop):
            if isinstance(message, Step):
                self.execute(message, rank)
            self.handled += 1
        self.send(Stopped(rank))
        time.sleep(0.05)
        return 0

    def take_fault(self, rank: int) -> None:
        for fault in os.environ.get("MINISGL_FAKE_FAULT", "").split(","):
            what, _, whose = fault.partition("@")
            if not whose or int(whose) == rank:
                self.kind, _, step = what.partition(":")
                self.fault_step = int(step or -1)

    def beat(self) -> None:
        while True:
            time.sleep(0.3)
            self.send(Heartbeat(self.handled, self.num_collectives))

    def execute(self, step: Step, rank: int) -> None:
        time.sleep(STEP_S)
        for admit in step.admits:
            self.lengths[admit.slot] = admit.num_cached_tokens
        if step.decode_slots is not None:
            self.decode = np.frombuffer(step.decode_slots, "<i4").tolist()
        rows = list(self.decode) if step.run_decode else []
        for slot in rows:
            self.lengths[slot] += 1
        for slot, start, length, is_last in np.frombuffer(step.prefills, "<i4").reshape(-1, 4).tolist():
            self.lengths[slot] = start + length
            rows += [slot] if is_last else []
        tokens = [10 + self.lengths[slot] % (NUM_TOKENS - 10) for slot in rows]
        step_id = step.step_id
        if step_id == self.fault_step:
            step_id, tokens = self.misbehave(step_id, tokens, rank)
        if rank == 0:
            self.send(Result(step_id, np.array(tokens, "<u4").tobytes(), b"", b""))

    def misbehave(self, step_id: int, tokens: list[int], rank: int) -> tuple[int, list[int]]:
        if self.kind.startswith("late_"):
            time.sleep(0.6)
        match self.kind.removeprefix("late_"):
            case "peer_lost":
                self.send(Failed(step_id, rank, "PeerLost", "the other side is gone"))
                time.sleep(0.2)
                os._exit(5)
            case "raise":
                self.send(Failed(step_id, rank, "RuntimeError", "a scripted fault"))
                time.sleep(0.2)
                os._exit(5)
            case "exit0":
                os._exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                time.sleep(60)
            case "wrong_step":
                return step_id + 1, tokens
            case "repeat":
                self.send(Result(step_id, np.array(tokens, "<u4").tobytes(), b"", b""))
            case "failed_row":
                return step_id, [tokens[0] | 1 << 31, *tokens[1:]]
        return step_id, tokens


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    watch_parent(int(arguments["--death-fd"]), kill_at_parents_end=True)
    sys.exit(FakeWorker(arguments["--steps"], arguments["--results"]).run())
