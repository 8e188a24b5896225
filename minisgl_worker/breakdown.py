"""Where the time of steps goes: parts of a profile, for a GPU by its kernels, for a CPU by torch's operations."""

import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from minisgl.protocol import Step
from minisgl_worker.model_runner import ModelRunner, StepHandle

# The first pattern that a name matches decides.
PARTS = {
    "attention": r"decode_kernel|prefill_kernel|attend|attention|flash|batchprefill|batchdecode|xqa|mha",
    "matmuls": r"gemm|gemv|matmul|nvjet|cutlass|xmma|linear|gate_up_kernel|down_kernel|splitk|::mm|::addmm|::bmm",
    "sampling": r"scan_kernel|choose_kernel|begin_kernel|finish_kernel|argmax|::max|topk|gumbel",
    "collectives": r"nccl|all_?reduce|all_?gather|gloo",
    "copies": r"memcpy|memset|::copy_|::_to_copy|index_select",
}
OTHER, IDLE = "other kernels", "idle"
WINDOW_STEPS = 24
NUM_DECODE_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of each part of some steps; they sum to `seconds`."""

    label: str
    num_steps: int
    seconds: float
    parts: dict[str, float]

    def format(self) -> str:
        """One line for each part, the largest first."""
        lines = [f"{self.label}: {self.num_steps} steps, {1e3 * self.seconds / self.num_steps:.3f} ms each"]
        for name, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            lines.append(f"{name:>16} {1e3 * seconds / self.num_steps:9.3f} ms {seconds / self.seconds:6.1%}")
        return "\n".join(lines)


def classify(name: str) -> str:
    """The part to which a kernel or an operation belongs."""
    lowered = name.lower()
    return next((part for part, pattern in PARTS.items() if re.search(pattern, lowered)), OTHER)


def break_down(runner: ModelRunner, steps: Sequence[Step], max_in_flight: int) -> list[Breakdown]:
    """Run all steps, and profile a few of them: the first with prompts, and decode steps from all over the run."""
    windows = choose_windows(steps)
    found: dict[str, list[Breakdown]] = defaultdict(list)
    position = 0
    for label, start, stop in windows:
        _run(runner, steps[position:start], max_in_flight)
        found[label].append(_profile(runner, steps[start:stop], max_in_flight, label))
        position = stop
    _run(runner, steps[position:], max_in_flight)
    return [_join(label, parts) for label, parts in found.items()]


def choose_windows(steps: Sequence[Step]) -> list[tuple[str, int, int]]:
    """(label, start, stop) in the order of the steps: runs of steps of one kind."""
    prefills = [i for i, step in enumerate(steps) if step.prefills]
    windows = []
    end = 0
    if prefills:
        start = end = prefills[0]
        while end < len(steps) and steps[end].prefills and end - start < WINDOW_STEPS:
            end += 1
        windows.append(("steps with prompts", start, end))
    for i in range(NUM_DECODE_WINDOWS):
        start = max(end, len(steps) * (2 * i + 1) // (2 * NUM_DECODE_WINDOWS))
        while start < len(steps) and steps[start].prefills:
            start += 1
        end = start
        while end < len(steps) and not steps[end].prefills and end - start < WINDOW_STEPS:
            end += 1
        if end > start:
            windows.append(("decode steps", start, end))
    return windows


def _run(runner: ModelRunner, steps: Iterable[Step], max_in_flight: int) -> None:
    in_flight: deque[StepHandle] = deque()
    for step in steps:
        in_flight.append(runner.execute(step))
        if len(in_flight) == max_in_flight:
            in_flight.popleft().result()
    for handle in in_flight:
        handle.result()


def _profile(runner: ModelRunner, steps: Sequence[Step], max_in_flight: int, label: str) -> Breakdown:
    is_cuda = runner.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        _run(runner, steps, max_in_flight)
        seconds = time.perf_counter() - started
    if is_cuda:
        spans = [
            (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return add_up_spans(label, len(steps), spans)
    parts: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        parts[classify(event.key)] += event.self_cpu_time_total / 1e6
    parts[IDLE] = max(0.0, seconds - sum(parts.values()))
    return Breakdown(label, len(steps), sum(parts.values()), dict(parts))


def add_up_spans(label: str, num_steps: int, spans: Sequence[tuple[str, float, float]]) -> Breakdown:
    """From kernels (name, start, end in seconds). What overlaps counts once, for the one that began first."""
    parts: dict[str, float] = defaultdict(float)
    first, last = min(start for _, start, _ in spans), max(end for _, _, end in spans)
    busy_until = first
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        parts[IDLE] += max(0.0, start - busy_until)
        parts[classify(name)] += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return Breakdown(label, num_steps, last - first, dict(parts))


def _join(label: str, windows: Sequence[Breakdown]) -> Breakdown:
    parts: dict[str, float] = defaultdict(float)
    for window in windows:
        for name, seconds in window.parts.items():
            parts[name] += seconds
    num_steps, seconds = sum(w.num_steps for w in windows), sum(w.seconds for w in windows)
    return Breakdown(label, num_steps, seconds, dict(parts))
