"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(claim: Callable[[], bool], seconds: float, fault: Callable[[], str] | None = None) -> None:
    """Return once `claim` is true; an AssertionError after that long, with what `fault` says then."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, fault() if fault is not None else f"not true after {seconds:g} s"
        time.sleep(0.01)
