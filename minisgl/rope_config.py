"""The rotary embedding of a model (`RopeConfig`), read from config.json in every layout that checkpoints use.

The kind and its numbers are under `rope_parameters` (transformers 5) or `rope_scaling` (before). Gemma 3 rotates the
layers with a window otherwise than the rest: two sets of numbers, nested (new) or in keys of their own (old).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from minisgl.json_file import JsonFile

# Kinds of rotary embedding, each with the numbers that it cannot do without.
ROPE_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
)
RopeValue = float | int | bool | tuple[float, ...]
QUERY_SCALING = "llama_4_scaling_beta"  # among the numbers of families whose queries are scaled by position
GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding, whichever keys stated it."""

    kind: str  # a key of ROPE_KINDS, or "divisors" of the frequencies, from a GGUF file
    theta: float
    parameters: Mapping[str, RopeValue] = field(default_factory=dict)  # the kind's other numbers


@dataclass(frozen=True, slots=True)
class RopePlan:
    """What the layers rotate by."""

    full: RopeConfig  # layers of full attention
    windowed: RopeConfig  # layers with a window
    num_positions: int  # that they serve


def read_rope(file: JsonFile, stated_positions: int) -> RopePlan:
    """One rotary embedding for all layers; raises ModelLoadError naming what is wrong with it."""
    rope, positions = _read_one(file, stated_positions)
    return RopePlan(rope, rope, positions)


def read_rope_pair(file: JsonFile, stated_positions: int) -> RopePlan:
    """One for the layers of full attention, one for those with a window (`rope_local_base_freq` in the old layout)."""
    nested = file.values.get("rope_parameters")
    if isinstance(nested, dict) and (GLOBAL in nested or LOCAL in nested):
        sets = {name: _take_set(file, nested, name) for name in (GLOBAL, LOCAL)}
    else:
        sets = {GLOBAL: {**file.values}, LOCAL: {}}
    sets[GLOBAL].setdefault("rope_theta", file.values.get("rope_theta"))
    sets[LOCAL].setdefault("rope_theta", file.values.get("rope_local_base_freq"))
    full, positions = _read_one(JsonFile(file.path, sets[GLOBAL]), stated_positions)
    windowed, _ = _read_one(JsonFile(file.path, sets[LOCAL]), stated_positions)
    return RopePlan(full, windowed, positions)


def _take_set(file: JsonFile, nested: Mapping[str, Any], name: str) -> dict[str, Any]:
    numbers = nested.get(name)
    if not isinstance(numbers, dict):
        raise file.fail(f"rope_parameters.{name}", numbers, "an object")
    return {"rope_parameters": numbers}


def _read_one(file: JsonFile, stated_positions: int) -> tuple[RopeConfig, int]:
    """A rotary embedding, and the number of positions that it serves."""
    key = "rope_parameters" if file.values.get("rope_parameters") is not None else "rope_scaling"
    stated = _read_numbers(file, key)
    old_kind = stated.pop("type", None)
    kind = stated.pop("rope_type", None) or old_kind or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise file.fail(f"{key}.rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    theta = file.number("rope_theta", 0.0, 1e15, default=10_000.0)
    if "rope_theta" in stated:
        theta = file.within(key, stated).number("rope_theta", 0.0, 1e15)
        del stated["rope_theta"]
    partial = stated.pop("partial_rotary_factor", file.values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise file.fail("partial_rotary_factor", partial, "1, as heads that rotate in part are not supported")
    if kind == "yarn":
        stated.setdefault("original_max_position_embeddings", stated_positions)
    for name, value in stated.items():
        if type(value) not in (int, float, bool) or not -1e9 <= value <= 1e9:
            raise file.fail(f"{key}.{name}", value, "a finite number")
    needed = {name: file.within(key, stated).number(name, 0.0, 1e9) for name in ROPE_KINDS[kind]}
    positions = stated_positions
    if kind == "yarn":  # users add this to a file that states the length before scaling, to get the length after it
        positions = max(positions, int(needed["original_max_position_embeddings"] * needed["factor"]))
    return RopeConfig(kind, theta, stated), positions


def _read_numbers(file: JsonFile, key: str) -> dict[str, Any]:
    value = file.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise file.fail(key, value, "an object")
    if any(isinstance(v, dict) for v in value.values()):
        raise file.fail(key, value, "one set of numbers for all layers")
    return {name: v for name, v in value.items() if v is not None}
