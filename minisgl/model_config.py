"""What a model's shape is (`ModelConfig`), read from config.json in the key layout of transformers 4 or 5.

Every value is checked when it is read: a missing, unsupported or absurd one is a `ModelLoadError` that names file, key
and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.families import FAMILIES, SUPPORTED_ARCHITECTURES, TEXT_PARTS, Family
from minisgl.json_file import JsonFile
from minisgl.rope_config import QUERY_SCALING, RopeConfig, read_rope, read_rope_pair

DTYPES = ("float32", "bfloat16", "float16", "float64")
HIDDEN_ACTS = ("silu", "gelu_pytorch_tanh")
NULL_HAS_MEANING = ("sliding_window",)  # null: no window. Elsewhere null is the same as leaving the key out
UNSUPPORTED_KEYS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts that takes the place of the MLP in some layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the weights of a token's experts sum to 1
    sparse_layers: frozenset[int]  # the layers that have it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. Sizes are whole-model ones, before tensor parallelism."""

    architecture: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    mlp_bias: bool
    hidden_act: str
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str  # of the checkpoint; "bfloat16" if unstated
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]  # [num_layers], None = full attention
    windowed_rope: RopeConfig | None = None  # of layers with a window; None = the same as `rope`
    output_bias: bool = False  # of the projection after attention
    query_pre_attn_scalar: float | None = None  # None = head_dim
    norm_offset: float = 0.0  # added to the weights of norms
    moe: MoeConfig | None = None
    is_text_part: bool = False  # of a model of text and images


def read_config(file: JsonFile) -> ModelConfig:
    """The checked shape; raises ModelLoadError naming the first key that is missing, absurd or unsupported."""
    stated = _read_architecture(file)
    architecture = _read_text_architecture(file, TEXT_PARTS[stated]) if stated in TEXT_PARTS else stated
    family = FAMILIES[architecture]
    file = _merge_defaults(file, family, is_text_part=stated in TEXT_PARTS)
    if file.values.get("quantization_config") is not None:
        raise ModelLoadError(f"{file.path}: quantization_config: quantized safetensors checkpoints are not supported")
    for key in UNSUPPORTED_KEYS:
        if file.values.get(key):
            raise file.fail(key, file.values[key], "nothing: it is not supported")
    hidden_size = file.integer("hidden_size", 2**20)
    num_heads = file.integer("num_attention_heads", 2**14)
    if file.values.get("head_dim") is None and hidden_size % num_heads:
        raise file.fail("num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}")
    read = read_rope_pair if family.windowed_rope else read_rope
    rope = read(file, file.integer("max_position_embeddings", 2**27))
    _check_query_scaling(file.within("rope_parameters", rope.full.parameters), family)
    num_layers = file.integer("num_hidden_layers", 2**12)
    window = _read_sliding_window(file, family)
    moe = _read_moe(file, num_layers) if family.has_experts else None
    attention_bias = file.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.integer("vocab_size", 2**24),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", 2**24),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.integer("num_key_value_heads", 2**14, default=num_heads),
        head_dim=file.integer("head_dim", 2**12, default=hidden_size // num_heads),
        rms_norm_eps=file.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        tie_word_embeddings=file.flag("tie_word_embeddings", False),
        attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        mlp_bias=file.flag("mlp_bias", False),
        hidden_act=file.choice("hidden_act", HIDDEN_ACTS, "silu"),
        rope=rope.full,
        windowed_rope=rope.windowed,
        max_position_embeddings=rope.num_positions,
        dtype=_read_dtype(file),
        sliding_window=window,
        layer_windows=_read_layer_windows(file, family, window, num_layers),
        query_pre_attn_scalar=_read_query_scalar(file),
        norm_offset=family.norm_offset,
        moe=moe,
        is_text_part=stated in TEXT_PARTS,
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
    if not isinstance(name, str) or name not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {name!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _read_text_architecture(file: JsonFile, families: Mapping[str, str]) -> str:
    """The family of a text part, by its model_type."""
    text = file.values.get("text_config")
    if not isinstance(text, dict):
        raise file.fail("text_config", text, "an object")
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise file.fail("text_config.model_type", kind, f"one of {', '.join(families)}")
    return families[kind]


def _merge_defaults(file: JsonFile, family: Family, *, is_text_part: bool) -> JsonFile:
    """The file with the family's defaults below its values and, for a model of text and images, text_config above."""
    values = {**family.defaults, **_drop_nulls(file.values)}
    if is_text_part:
        kept = [key for key in ("tie_word_embeddings", "dtype", "torch_dtype") if file.values.get(key) is not None]
        text = _drop_nulls(file.values["text_config"])
        values.update({key: value for key, value in text.items() if key not in kept})
    if values.get("hidden_activation") is not None:  # Gemma's name for it
        values["hidden_act"] = values["hidden_activation"]
    return JsonFile(file.path, values)


def _drop_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None or key in NULL_HAS_MEANING}


def _read_dtype(file: JsonFile) -> str:
    key = "dtype" if file.values.get("dtype") is not None else "torch_dtype"
    return file.choice(key, DTYPES, "bfloat16")


def _check_query_scaling(rope: JsonFile, family: Family) -> None:
    if family.scales_queries:
        for key in (QUERY_SCALING, "original_max_position_embeddings"):
            rope.number(key, 0.0, 1e9)
    elif QUERY_SCALING in rope.values:
        raise rope.fail(
            QUERY_SCALING, rope.values[QUERY_SCALING], "nothing: the family does not scale queries by position"
        )


def _read_query_scalar(file: JsonFile) -> float | None:
    if file.values.get("query_pre_attn_scalar") is None:
        return None
    return file.number("query_pre_attn_scalar", 0.0, 1e9)


def _read_moe(file: JsonFile, num_layers: int) -> MoeConfig:
    key = "num_experts" if file.values.get("num_experts") is not None else "num_local_experts"
    num_experts = file.integer(key, 2**12)
    step = file.integer("decoder_sparse_step", 2**12, default=1)
    dense = file.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise file.fail("mlp_only_layers", dense, "a list of layer numbers")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=file.integer("num_experts_per_tok", num_experts),
        intermediate_size=file.integer("moe_intermediate_size", 2**20),
        norm_topk_prob=file.flag("norm_topk_prob", False),
        sparse_layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    )


def _read_sliding_window(file: JsonFile, family: Family) -> int | None:
    if family.windows == "never" or file.values.get("sliding_window") is None:
        return None
    if not file.flag("use_sliding_window", family.windows == "stated"):
        return None
    return file.integer("sliding_window", 2**27)


def _read_layer_windows(file: JsonFile, family: Family, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` decides per layer; else every sixth or so is full, or the first `max_window_layers` are."""
    if window is None:
        return (None,) * num_layers
    if family.all_windowed:
        return (window,) * num_layers
    types = file.values.get("layer_types")
    if types is None and "sliding_window_pattern" in file.values:
        pattern = file.integer("sliding_window_pattern", 2**12)
        return tuple(window if (i + 1) % pattern else None for i in range(num_layers))
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
