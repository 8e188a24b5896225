"""Replays the recorded `steps` channel of an engine on a worker alone, for measurements and bug reports.

A recording is what `--record-steps FILE` wrote: each frame as a u32 little-endian length and then its bytes, the
Configure first. It is replayed on one device, whatever the number of ranks was: all of them got the same steps.
"""

import dataclasses
import hashlib
import json
import statistics
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from minisgl.config import EngineConfig
from minisgl.errors import EXIT_START, MinisglError, ProtocolError, ProtocolMismatch
from minisgl.protocol import PROTOCOL_VERSION, Configure, Message, Step, decode
from minisgl_worker.breakdown import break_down
from minisgl_worker.model_runner import ModelRunner, StepHandle

EXIT_UNEXPECTED = 1  # the tokens are not those of --expect


@dataclass(frozen=True, slots=True)
class Recording:
    configure: Configure
    steps: list[Step]
    num_cut_bytes: int  # of an unfinished frame at the end, as an engine that was killed leaves it


@dataclass(frozen=True, slots=True)
class _Run:
    """What one pass over the steps gave."""

    seconds: float
    num_tokens: int
    decode_ms: list[float]  # from launch to launch, for each step without prefill rows; never empty
    prefill_ms: list[float]  # the same for the other steps; never empty
    digest: str  # of all tokens in their order


def replay(
    file: str, repeat: int = 1, trace: str | None = None, expect: str | None = None, *, has_breakdown: bool = False
) -> int:
    """Run every step of a recording `repeat` times; prints a table, and one JSON object as its last line.

    Args:
        trace: file that receives a profile of the last run, for chrome://tracing and its like.
        has_breakdown: run once more, and print where the time of some steps goes.
        expect: the digest that an earlier replay printed; tokens that differ are exit code 1.

    Returns:
        The process's exit code.
    """
    try:
        recording = read_recording(Path(file))
        config = make_replay_config(recording)
        runner = ModelRunner(config)
    except (MinisglError, OSError) as error:
        print(f"minisgl_worker: {error}", file=sys.stderr)
        return EXIT_START
    if recording.num_cut_bytes:
        print(f"minisgl_worker: {file} ends within a step, which is left out", file=sys.stderr)
    runs = []
    for number in range(repeat):
        if trace is not None and number == repeat - 1:
            with torch.profiler.profile() as profile:
                runs.append(_run(runner, recording.steps, config.max_steps_in_flight))
            profile.export_chrome_trace(trace)
            where = "self_device_time_total" if runner.device.type == "cuda" else "self_cpu_time_total"
            print(profile.key_averages().table(sort_by=where, row_limit=25, max_name_column_width=60), file=sys.stderr)
        else:
            runs.append(_run(runner, recording.steps, config.max_steps_in_flight))
    if has_breakdown:
        for part in break_down(runner, recording.steps, config.max_steps_in_flight):
            print(part.format())
    _print_report(runs, len(recording.steps), runner.summary())
    if expect is not None and {run.digest for run in runs} != {expect}:
        found = ", ".join(sorted({run.digest for run in runs}))
        print(f"minisgl_worker: the tokens differ: digest {found}, expected {expect}", file=sys.stderr)
        return EXIT_UNEXPECTED
    return 0


def read_recording(file: Path) -> Recording:
    """The configuration and the steps. Raises ProtocolError when the file is not a recording of this protocol."""
    data = file.read_bytes()
    messages: list[Message] = []
    position = 0
    while position + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, position)
        if position + 4 + size > len(data):
            break
        messages.append(decode(data[position + 4 : position + 4 + size]))
        position += 4 + size
    if not messages or not isinstance(configure := messages[0], Configure):
        raise ProtocolError(f"{file} is not a recording: it does not begin with a configuration")
    if configure.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{file} was recorded with protocol {configure.protocol_version}, this is protocol {PROTOCOL_VERSION}"
        )
    steps = [message for message in messages if isinstance(message, Step)]
    return Recording(configure, steps, len(data) - position)


def make_replay_config(recording: Recording) -> EngineConfig:
    """The recorded configuration for one rank. A pool that was sized by memory gets the pages that the steps name."""
    config = EngineConfig.from_wire(json.loads(recording.configure.config_json))
    num_pages = config.num_pages
    if num_pages is None:
        named = [np.frombuffer(step.page_grants, "<i4")[2::3] for step in recording.steps]
        named += [np.frombuffer(admit.page_ids, "<i4") for step in recording.steps for admit in step.admits]
        num_pages = 1 + int(max((ids.max(initial=0) for ids in named), default=0))
    return dataclasses.replace(config, tp_size=1, num_pages=num_pages)


def _run(runner: ModelRunner, steps: list[Step], max_in_flight: int) -> _Run:
    """As a worker does: at most `max_in_flight` steps are launched and not waited for."""
    digest, num_tokens = hashlib.sha256(), 0
    decode_ms, prefill_ms = [], []
    in_flight: deque[StepHandle] = deque()
    started = before = time.perf_counter()
    for step in steps:
        in_flight.append(runner.execute(step))
        if len(in_flight) == max_in_flight:
            tokens = in_flight.popleft().result().tokens
            digest.update(tokens)
            num_tokens += len(tokens) // 4
        now = time.perf_counter()
        (prefill_ms if step.prefills else decode_ms).append(1e3 * (now - before))
        before = now
    for handle in in_flight:
        tokens = handle.result().tokens
        digest.update(tokens)
        num_tokens += len(tokens) // 4
    seconds = time.perf_counter() - started
    return _Run(seconds, num_tokens, decode_ms or [0.0], prefill_ms or [0.0], digest.hexdigest()[:16])


def _print_report(runs: list[_Run], num_steps: int, summary: str) -> None:
    best = min(runs, key=lambda run: run.seconds)
    report = {
        "num_steps": num_steps,
        "num_tokens": best.num_tokens,
        "seconds": round(best.seconds, 4),
        "steps_per_s": round(num_steps / best.seconds, 1),
        "tokens_per_s": round(best.num_tokens / best.seconds, 1),
        "decode_step_ms_median": round(statistics.median(best.decode_ms), 3),
        "decode_step_ms_max": round(max(best.decode_ms), 3),
        "prefill_step_ms_median": round(statistics.median(best.prefill_ms), 3),
        "prefill_step_ms_max": round(max(best.prefill_ms), 3),
        "digest": best.digest,
        "is_repeatable": len({run.digest for run in runs}) == 1,
        "device": summary,
    }
    for name, value in report.items():
        print(f"{name:>24}: {value}")
    print(json.dumps(report))
