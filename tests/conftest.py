"""For every test: a time limit, and no network."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

TIME_LIMITS_S = {"unit": 60, "process": 90, "worker": 90, "gpu": 300}  # a hang fails its test, not the whole run

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_configure() -> None:
    """A shell in the background hands SIGINT on as ignored, and tests of interrupts would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("time_limit")
    limit_s = marker.args[0] if marker else TIME_LIMITS_S[item.path.relative_to(Path(__file__).parent).parts[0]]

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.name} is not done after {limit_s} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(limit_s)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
