"""Replays the recorded `steps` channel of an engine on a worker alone, for measurements and bug reports.

A recording is what `--record-steps FILE` wrote: each frame as a u32 little-endian length and then its bytes, the
Configure first.
"""

import hashlib
import json
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from minisgl.config import EngineConfig
from minisgl.errors import MinisglError, ProtocolError
from minisgl.protocol import Configure, Step, decode
from minisgl_worker.model_runner import ModelRunner

STEPS_IN_FLIGHT = 2


def replay(file: str, repeat: int = 1, trace: str | None = None) -> int:
    """Run every step of a recording `repeat` times; prints a table, and one JSON object as its last line.

    Args:
        trace: file that receives a profile of the last run, for chrome://tracing and its like.

    Returns:
        The process's exit code.
    """
    try:
        configure, steps = read_recording(Path(file))
        runner = ModelRunner(EngineConfig.from_wire(json.loads(configure.config_json)))
    except (MinisglError, OSError) as error:
        print(f"minisgl_worker: {error}", file=sys.stderr)
        return 3
    runs = []
    for number in range(repeat):
        if trace is not None and number == repeat - 1:
            with torch.profiler.profile() as profile:
                runs.append(_run(runner, steps))
            profile.export_chrome_trace(trace)
            where = "self_device_time_total" if runner.device.type == "cuda" else "self_cpu_time_total"
            print(profile.key_averages().table(sort_by=where, row_limit=25, max_name_column_width=60), file=sys.stderr)
        else:
            runs.append(_run(runner, steps))
    best = min(runs, key=lambda run: run.seconds)
    report = {
        "num_steps": len(steps),
        "num_tokens": best.num_tokens,
        "seconds": round(best.seconds, 4),
        "tokens_per_s": round(best.num_tokens / best.seconds, 1),
        "decode_step_ms_median": round(best.decode_step_ms, 3),
        "digest": best.digest,
        "is_repeatable": len({run.digest for run in runs}) == 1,
        "device": runner.summary(),
    }
    for name, value in report.items():
        print(f"{name:>24}: {value}")
    print(json.dumps(report))
    return 0


def read_recording(file: Path) -> tuple[Configure, list[Step]]:
    """The configuration and the steps. Raises ProtocolError when the file is not a recording."""
    messages = [decode(frame) for frame in _read_frames(file)]
    if not messages or not isinstance(messages[0], Configure):
        raise ProtocolError(f"{file} is not a recording: it does not begin with a configuration")
    return messages[0], [message for message in messages if isinstance(message, Step)]


class _Run:
    """What one pass over the steps gave."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_tokens = 0
        self.decode_step_ms = 0.0
        self.digest = ""


def _run(runner: ModelRunner, steps: list[Step]) -> _Run:
    """As the worker does: at most two steps are launched and not waited for."""
    run, digest, times = _Run(), hashlib.sha256(), []
    in_flight = []
    started = time.perf_counter()
    for step in steps:
        in_flight.append(runner.execute(step))
        if len(in_flight) >= STEPS_IN_FLIGHT:
            tokens = in_flight.pop(0).result().tokens
            digest.update(tokens)
            run.num_tokens += len(tokens) // 4
        times.append(time.perf_counter())
    for handle in in_flight:
        tokens = handle.result().tokens
        digest.update(tokens)
        run.num_tokens += len(tokens) // 4
    run.seconds = time.perf_counter() - started
    spans = [after - before for before, after in zip([started, *times], times, strict=False)]
    decode_spans = [span for span, step in zip(spans, steps, strict=True) if not step.prefills]
    run.decode_step_ms = 1e3 * statistics.median(decode_spans or [0.0])
    run.digest = digest.hexdigest()[:16]
    return run


def _read_frames(file: Path) -> Iterator[bytes]:
    data = file.read_bytes()
    position = 0
    while position < len(data):
        if position + 4 > len(data):
            raise ProtocolError(f"{file} is cut off at byte {position}")
        (size,) = struct.unpack_from("<I", data, position)
        if position + 4 + size > len(data):
            raise ProtocolError(f"{file} is cut off at byte {position}")
        yield data[position + 4 : position + 4 + size]
        position += 4 + size
