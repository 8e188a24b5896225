"""A model's shape from the metadata of a GGUF file, by way of config.json's keys, so that the same checks apply."""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from minisgl.errors import ModelLoadError
from minisgl.families import FAMILIES
from minisgl.gguf_header import GgufHeader
from minisgl.json_file import JsonFile
from minisgl.model_config import ModelConfig, read_config
from minisgl.rope_config import RopeConfig

NAMES = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.gguf_names))
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
FILE_DTYPES: Mapping[object, str] = MappingProxyType({0: "float32", 1: "float16"})  # of general.file_type
FREQUENCY_DIVISORS = "rope_freqs.weight"
F32 = 0


def read_gguf_end_ids(header: GgufHeader, config: ModelConfig) -> tuple[int, ...]:
    """The model's own end ids, sorted."""
    metadata = JsonFile(header.path, header.metadata)
    return tuple(sorted({i for key in END_KEYS for i in metadata.token_ids(key) if i < config.vocab_size}))


def read_gguf_config(header: GgufHeader) -> ModelConfig:
    """The checked shape; raises ModelLoadError naming the first key that is missing, absurd or unsupported."""
    metadata = header.metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in NAMES:
        raise ModelLoadError(
            f"{header.path}: general.architecture {name!r} is not supported; supported are {', '.join(NAMES)}"
        )
    architectures = [key for key, family in FAMILIES.items() if name in family.gguf_names]
    has_experts = FAMILIES[architectures[0]].has_experts
    for key in (f"{name}.expert_count", f"{name}.attention.temperature_scale"):
        if metadata.get(key) and not (has_experts and key.endswith("expert_count")):
            raise ModelLoadError(f"{header.path}: {key} {metadata[key]!r} is not supported in GGUF files")
    if (parts := metadata.get("split.count", 0)) not in (0, 1):
        raise ModelLoadError(
            f"{header.path} is one of {parts} parts of a model (split.count); merge them into one file"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path} has no matrix token_embd.weight")
    window = metadata.get(f"{name}.attention.sliding_window") or None
    if window is not None:  # of families that share a name, the one that has windows
        architectures.sort(key=lambda key: FAMILIES[key].windows == "never")
    values = {
        "architectures": architectures,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.get(f"{name}.embedding_length"),
        "intermediate_size": metadata.get(f"{name}.feed_forward_length"),
        "num_experts": metadata.get(f"{name}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{name}.expert_used_count"),
        "moe_intermediate_size": metadata.get(f"{name}.expert_feed_forward_length"),
        "norm_topk_prob": True,  # no file says so, and llama.cpp does so
        "num_hidden_layers": metadata.get(f"{name}.block_count"),
        "num_attention_heads": metadata.get(f"{name}.attention.head_count"),
        "num_key_value_heads": metadata.get(f"{name}.attention.head_count_kv"),
        "head_dim": metadata.get(f"{name}.attention.key_length"),
        "rms_norm_eps": metadata.get(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get(f"{name}.rope.freq_base"),
        "rope_scaling": _read_scaling(header, name),
        "max_position_embeddings": metadata.get(f"{name}.context_length"),
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "dtype": FILE_DTYPES.get(metadata.get("general.file_type")),
    }
    config = read_config(JsonFile(header.path, values))
    for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
        if metadata.get(key) not in (None, config.head_dim):
            raise ModelLoadError(f"{header.path}: {key} is {metadata[key]!r}, expected the head size {config.head_dim}")
    if FREQUENCY_DIVISORS in header.tensors:
        rope = _read_divisors(header, config)
        config = replace(config, rope=rope, windowed_rope=rope)
    return config


def _read_scaling(header: GgufHeader, name: str) -> dict[str, Any] | None:
    """`rope_scaling` of config.json: linear and yarn have keys of their own."""
    metadata, prefix = header.metadata, f"{name}.rope.scaling"
    kind = metadata.get(f"{prefix}.type")
    if kind in (None, "none"):
        factor = metadata.get(f"{name}.rope.scale_linear")  # the key of old files
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{header.path}: {prefix}.type is {kind!r}, expected none, linear or yarn")
    factor = metadata.get(f"{prefix}.factor")
    if type(factor) is not float:
        raise ModelLoadError(f"{header.path}: {prefix}.factor is {factor!r}, expected a number")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.get(f"{prefix}.original_context_length")
        scaling["beta_fast"] = metadata.get(f"{prefix}.yarn_beta_fast")
        scaling["beta_slow"] = metadata.get(f"{prefix}.yarn_beta_slow")
        share = metadata.get(f"{prefix}.yarn_attn_factor", metadata.get(f"{prefix}.attn_factor"))
        if type(share) is float and factor > 1:  # of what yarn computes from the factor
            scaling["attention_factor"] = share * (0.1 * math.log(factor) + 1.0)
    return scaling


def _read_divisors(header: GgufHeader, config: ModelConfig) -> RopeConfig:
    """The kind in which Llama 3.1's scaling is written: a divisor for the frequency of every pair of values."""
    tensor = header.tensors[FREQUENCY_DIVISORS]
    if config.rope.kind != "default":
        raise ModelLoadError(f"{header.path}: {FREQUENCY_DIVISORS} besides scaling of kind {config.rope.kind}")
    count = config.head_dim // 2
    if tensor.shape != (count,) or tensor.ggml_type != F32:
        expected = f"expected {count} floats"
        raise ModelLoadError(f"{header.path}: {FREQUENCY_DIVISORS} has the shape {tensor.shape}, {expected}")
    with header.path.open("rb") as file:
        file.seek(tensor.offset_bytes)
        divisors = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(0 < divisor < 1e9 for divisor in divisors):
        raise ModelLoadError(f"{header.path}: {FREQUENCY_DIVISORS} holds {min(divisors)} and {max(divisors)}")
    return RopeConfig("divisors", config.rope.theta, {"divisors": divisors})
