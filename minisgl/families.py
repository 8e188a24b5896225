"""The model families: what each takes for granted, where its config.json says the rest, and which tensors it has.

A family is one row here, and one in `minisgl_worker.models` that says what builds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What is so in all models of a family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # for keys that config.json does not have
    windows: str = "never"  # "opt-in": with use_sliding_window; "stated": whenever sliding_window is a number
    all_windowed: bool = False  # every layer has the window, whatever layer_types says
    windowed_rope: bool = False  # layers with a window rotate by numbers of their own
    has_experts: bool = False
    scales_queries: bool = False  # by their position
    qkv_bias: bool | None = None  # None: as attention_bias says
    qk_norm: bool = False  # each head of q and k is normalised
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_offset: float = 0.0  # added to the weights of norms
    gguf_names: tuple[str, ...] = ()  # of its architecture in GGUF files
    gguf_permuted: bool = False  # they have the rows of q and k in another order, for rotating neighbours


_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = Family(
    {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    windows="stated", windowed_rope=True, qk_norm=True, norm_offset=1.0,
    layer_norms=(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
)  # fmt: skip
# By the architecture in config.json. GGUF files name Mistral models before the third `llama`, with or without a window.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(gguf_names=("llama",), gguf_permuted=True),
        "MistralForCausalLM": Family(
            {"sliding_window": 4096}, windows="stated", all_windowed=True,
            gguf_names=("llama", "mistral", "mistral3"), gguf_permuted=True,
        ),
        "Ministral3ForCausalLM": Family(
            {"head_dim": 128, "rms_norm_eps": 1e-5}, windows="stated", all_windowed=True, scales_queries=True
        ),
        "Qwen2ForCausalLM": Family(_QWEN_WINDOWS, windows="opt-in", qkv_bias=True, gguf_names=("qwen2",)),
        "Qwen3ForCausalLM": Family(
            {"head_dim": 128, **_QWEN_WINDOWS}, windows="opt-in", qk_norm=True, gguf_names=("qwen3",)
        ),
        "Qwen3MoeForCausalLM": Family(
            {"sliding_window": 4096}, windows="opt-in", all_windowed=True, has_experts=True, qk_norm=True,
            gguf_names=("qwen3moe",),
        ),
        "Gemma3ForCausalLM": _GEMMA3,
    }
)  # fmt: skip
# Models of text and images: the model_type of their text_config -> the family of their text part.
TEXT_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Mistral3ForConditionalGeneration": {
            "mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM",
        },
        "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    }
)  # fmt: skip
SUPPORTED_ARCHITECTURES = (*FAMILIES, *TEXT_PARTS)
