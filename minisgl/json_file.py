"""A JSON object from a file that nobody trusts, and accessors that check what they return."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20


class JsonFile:
    """One JSON object from a file; the accessors check, and name file, key and value in their ModelLoadError."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None, prefix: str = ""):
        self.path = path
        self.values = _load_json(path) if values is None else values
        self._prefix = prefix

    def within(self, key: str, values: Mapping[str, Any]) -> "JsonFile":
        """The object under `key`, for further accessors."""
        return JsonFile(self.path, values, f"{self._prefix}{key}.")

    def fail(self, key: str, value: object, expected: str) -> ModelLoadError:
        if value is None:
            return ModelLoadError(f"{self.path}: {self._prefix}{key} is missing, expected {expected}")
        return ModelLoadError(f"{self.path}: {self._prefix}{key} is {value!r:.100}, expected {expected}")

    def integer(self, key: str, high: int, default: int | None = None) -> int:
        """Between 1 and `high`."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= high:
            raise self.fail(key, value, f"an integer between 1 and {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Above `low` and at most `high`."""
        value: Any = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not low < value <= high:
            raise self.fail(key, value, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if value not in allowed:
            raise self.fail(key, value, f"one of {', '.join(allowed)}")
        return str(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise self.fail(key, value, "a token id or a list of token ids")
        return tuple(ids)


def _load_json(path: Path) -> Mapping[str, Any]:
    try:
        if not path.is_file() and path.exists():  # a pipe would be waited for
            raise ModelLoadError(f"{path} is not a file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, limit {MAX_JSON_BYTES}")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds {type(values).__name__}, expected a JSON object")
    return values
