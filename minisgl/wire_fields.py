"""What a field of a wire message may hold.

Each kind is a check: it takes the decoded value and returns it, or raises ProtocolError. `protocol` ties them
to its fields.
"""

import math
from collections.abc import Callable
from typing import Any

from minisgl.errors import ProtocolError

MAX_TEXT_BYTES = 2**16

Check = Callable[[Any], Any]


def as_integer(low: int = 0, high: int = 2**31 - 1) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"expected an integer in {low}..{high}, got {value!r:.60}")
        return value

    return check


def as_number(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError(f"expected a finite float, got {value!r:.60}")
    return value


def as_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"expected a bool, got {value!r:.60}")
    return value


def as_text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT_BYTES:
        raise ProtocolError(f"expected text of at most {MAX_TEXT_BYTES} characters, got {value!r:.60}")
    return value


def as_packed(item_bytes: int, multiple: int = 1) -> Check:
    """Raw little-endian items of `item_bytes` each, their count a multiple of `multiple`."""
    unit = item_bytes * multiple

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) % unit:
            raise ProtocolError(f"expected bytes in units of {unit}, got {value!r:.60}")
        return value

    return check


def as_optional(inner: Check) -> Check:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def as_sequence(inner: Check, limit: int = 2**20) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > limit:
            raise ProtocolError(f"expected a list of at most {limit} items, got {value!r:.60}")
        return tuple(inner(item) for item in value)

    return check


as_u64 = as_integer(0, 2**64 - 1)
