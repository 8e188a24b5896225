"""What a model's shape is (`ModelConfig`), read from config.json in the key layout of transformers 4 or 5.

Every value is checked when it is read: a missing, unsupported or absurd one is a `ModelLoadError` that names file, key
and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile

DTYPES = ("float32", "bfloat16", "float16", "float64")
HIDDEN_ACTS = ("silu",)

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


@dataclass(frozen=True, slots=True)
class Family:
    """What a family takes for granted where its config.json is silent."""

    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    tie_word_embeddings: bool = False
    windows: str = "never"  # "opt-in": with use_sliding_window; "stated": whenever sliding_window is a number


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "Qwen3ForCausalLM": Family(head_dim=128, windows="opt-in"),
    }
)
SUPPORTED_ARCHITECTURES = tuple(FAMILIES)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding, whichever keys stated it."""

    kind: str  # a key of ROPE_KINDS
    theta: float
    parameters: Mapping[str, RopeValue] = field(default_factory=dict)  # the kind's other numbers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. Sizes are whole-model ones, before tensor parallelism."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str  # of the checkpoint; "bfloat16" if unstated
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]  # [num_layers], None = full attention


def read_config(file: JsonFile) -> ModelConfig:
    """The checked shape; raises ModelLoadError naming the first key that is missing, absurd or unsupported."""
    architecture = _read_architecture(file)
    family = FAMILIES[architecture]
    if file.values.get("quantization_config") is not None:
        raise ModelLoadError(f"{file.path}: quantization_config: quantized safetensors checkpoints are not supported")
    hidden_size = file.integer("hidden_size", 2**20)
    num_heads = file.integer("num_attention_heads", 2**14)
    head_dim = file.values.get("head_dim") or family.head_dim
    if head_dim is None and hidden_size % num_heads:
        raise file.fail("num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}")
    stated_positions = file.integer("max_position_embeddings", 2**27)
    rope, max_positions = _read_rope(file, stated_positions)
    num_layers = file.integer("num_hidden_layers", 2**12)
    window = _read_sliding_window(file, family)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size", 2**24),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", 2**24),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", 2**14, default=num_heads),
        head_dim=file.integer("head_dim", 2**12, default=head_dim or hidden_size // num_heads),
        rms_norm_eps=file.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        tie_word_embeddings=file.flag("tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=file.flag("attention_bias", False),
        mlp_bias=file.flag("mlp_bias", False),
        hidden_act=file.choice("hidden_act", HIDDEN_ACTS, "silu"),
        rope=rope,
        max_position_embeddings=max_positions,
        dtype=_read_dtype(file),
        sliding_window=window,
        layer_windows=_read_layer_windows(file, window, num_layers),
    )
    check_heads(config, file.path)
    return config


def check_heads(config: ModelConfig, path: Path) -> None:
    """Raises ModelLoadError when the numbers of heads do not fit each other."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{path}: {config.num_heads} attention heads do not divide among {config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{path}: head_dim is {config.head_dim}, expected an even number")


def _read_architecture(file: JsonFile) -> str:
    names = file.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelLoadError(
            f"{file.path}: architecture {name!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _read_dtype(file: JsonFile) -> str:
    key = "dtype" if file.values.get("dtype") is not None else "torch_dtype"
    return file.choice(key, DTYPES, "bfloat16")


def _read_rope(file: JsonFile, stated_positions: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the number of positions that it serves."""
    key = "rope_parameters" if file.values.get("rope_parameters") is not None else "rope_scaling"
    stated = _read_rope_numbers(file, key)
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


def _read_rope_numbers(file: JsonFile, key: str) -> dict[str, Any]:
    value = file.values.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise file.fail(key, value, "an object")
    if any(isinstance(v, dict) for v in value.values()):
        raise file.fail(key, value, "one set of numbers for all layers")
    return {name: v for name, v in value.items() if v is not None}


def _read_sliding_window(file: JsonFile, family: Family) -> int | None:
    if family.windows == "never" or file.values.get("sliding_window") is None:
        return None
    if not file.flag("use_sliding_window", family.windows == "stated"):
        return None
    return file.integer("sliding_window", 2**27)


def _read_layer_windows(file: JsonFile, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` decides per layer; else the layers from `max_window_layers` on have the window, or all."""
    if window is None:
        return (None,) * num_layers
    types = file.values.get("layer_types")
    if types is None:
        first = file.values.get("max_window_layers") or 0
        if type(first) is not int or first < 0:
            raise file.fail("max_window_layers", first, "a number of layers")
        return tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise file.fail("layer_types", types, f"a list of {num_layers} names")
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for name in types:
        if not isinstance(name, str) or name not in windows:
            raise file.fail("layer_types", name, "full_attention or sliding_attention")
    return tuple(windows[name] for name in types)
