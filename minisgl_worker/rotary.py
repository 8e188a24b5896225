"""Rotary position embedding: the table of cosines and sines for each kind of frequency scaling.

Frequencies follow the checkpoints' own definitions as transformers computes them; a kind that is not listed in
`FREQUENCIES` is refused by name.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from minisgl.errors import ModelLoadError
from minisgl.model_folder import ModelConfig, RopeConfig
from minisgl.rope_config import QUERY_SCALING


def build_rotary_tables(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """The table of each layer; layers that rotate alike share one.

    Args:
        num_positions: of the longest sequence, at most config.max_position_embeddings.
    Returns:
        For each layer [num_positions, head_dim] fp32 (fp64 for fp64 models), on `device`.
    """
    full = _build_table(config.rope, config, num_positions, dtype, device)
    windowed = full
    if config.windowed_rope not in (None, config.rope):
        assert config.windowed_rope is not None
        windowed = _build_table(config.windowed_rope, config, num_positions, dtype, device)
    return tuple(full if window is None else windowed for window in config.layer_windows)


def build_query_scale(rope: RopeConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the query of each position is multiplied by, [num_positions] in `dtype`."""
    length, beta = (float(rope.parameters[name]) for name in ("original_max_position_embeddings", QUERY_SCALING))
    lengths = torch.floor(torch.arange(num_positions) / length)  # whole trained lengths before a position
    return (1 + beta * torch.log(1 + lengths)).to(device=device, dtype=dtype)


def _build_table(
    rope: RopeConfig, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The table for positions 0 .. num_positions - 1.

    Returns:
        [num_positions, head_dim] fp32 (fp64 for fp64 models): cosines of head_dim / 2 angles, then their sines.
    """
    if rope.kind not in FREQUENCIES:
        raise ModelLoadError(
            f"rotary embedding of kind {rope.kind!r} is not supported; supported are {list(FREQUENCIES)}"
        )
    frequencies, factor = FREQUENCIES[rope.kind](rope, config.head_dim, config.max_position_embeddings)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device=device, dtype=wide)


def _base_frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))


def _default(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    return _base_frequencies(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    return _base_frequencies(rope.theta, head_dim) / float(rope.parameters["factor"]), 1.0


def _dynamic(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """NTK scaling changes with the length of the sequence; up to the trained length it is the default table."""
    return _base_frequencies(rope.theta, head_dim), 1.0


def _divisors(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Of GGUF files, which state the outcome of a scaling rather than its kind."""
    return _base_frequencies(rope.theta, head_dim) / torch.tensor(rope.parameters["divisors"]), 1.0


def _llama3(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones are kept, those between are blended."""
    p = rope.parameters
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    original = float(p["original_max_position_embeddings"])
    base = _base_frequencies(rope.theta, head_dim)
    wavelength = 2 * math.pi / base
    blend = (original / wavelength - low) / (high - low)
    scaled = torch.where(wavelength > original / low, base / factor, base)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, (1 - blend) * base / factor + blend * base, scaled), 1.0


def _yarn(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Peng et al. 2023: interpolate the slow dimensions, keep the fast ones, ramp between; scale the attention."""
    p = rope.parameters
    factor, original = float(p["factor"]), float(p["original_max_position_embeddings"])
    beta_fast, beta_slow = float(p.get("beta_fast") or 32), float(p.get("beta_slow") or 1)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    base = _base_frequencies(rope.theta, head_dim)
    return base / factor * ramp + base * (1 - ramp), _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Mapping[str, object], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])  # type: ignore[arg-type]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return scale(float(p["mscale"])) / scale(float(p["mscale_all_dim"]))  # type: ignore[arg-type]
    return scale(1.0)


Frequencies = Callable[[RopeConfig, int, int], tuple[Tensor, float]]
FREQUENCIES: Mapping[str, Frequencies] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "divisors": _divisors,
    }
)
