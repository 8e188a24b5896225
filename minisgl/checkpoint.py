"""Which tensors a model's checkpoint must hold, and under what names: checked from headers, before anything is loaded.

Names are those of transformers' text models. A file may have its own for them: GGUF's, or those of a model of text and
images, whose other parts are passed over.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from minisgl.errors import ModelLoadError
from minisgl.families import FAMILIES
from minisgl.gguf_header import GgufTensor
from minisgl.model_config import ModelConfig
from minisgl.safetensors_files import DTYPE_BYTES, StoredTensor

Shape = tuple[int, ...]
NUM_NAMED = 5  # tensors in the text of an error

# Names of GGUF files, piece by piece, for the names that transformers uses.
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
GGUF_EXTRAS = ("rope_freqs.weight",)  # read with the header
# Where models of text and images keep their text model: the published layout, then that of transformers 5.
TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))
IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that the model cannot do without."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config, layer)})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    family, hidden, size = FAMILIES[config.architecture], config.hidden_size, config.head_dim
    query, key = config.num_heads * size, config.num_kv_heads * size
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield from _linear(f"self_attn.{name}", rows, hidden, config.attention_bias)
    yield from _linear("self_attn.o_proj", hidden, query, config.output_bias)
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (size,)
        yield "self_attn.k_norm.weight", (size,)
    for norm in family.layer_norms:
        yield f"{norm}.weight", (hidden,)
    if config.moe is None or layer not in config.moe.sparse_layers:
        yield from _mlp("mlp", config.intermediate_size, hidden, config.mlp_bias)
        return
    yield "mlp.gate.weight", (config.moe.num_experts, hidden)
    for i in range(config.moe.num_experts):
        yield from _mlp(f"mlp.experts.{i}", config.moe.intermediate_size, hidden, has_bias=False)


def _mlp(name: str, size: int, hidden: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{name}.gate_proj", size, hidden, has_bias)
    yield from _linear(f"{name}.up_proj", size, hidden, has_bias)
    yield from _linear(f"{name}.down_proj", hidden, size, has_bias)


def _linear(name: str, out_size: int, in_size: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if has_bias:
        yield f"{name}.bias", (out_size,)


def name_safetensors(stored: Mapping[str, StoredTensor], config: ModelConfig, path: Path) -> dict[str, StoredTensor]:
    """The model's tensors among the `stored` ones, by the model's names.

    Raises:
        ModelLoadError: one is missing, has no place in the model, or another shape or a dtype that is not supported.
    """
    named, extra = {}, []
    expected = expected_tensors(config)
    for stored_name, tensor in stored.items():
        name = text_name(stored_name, config)
        if name in expected:
            named[name] = tensor
        elif name is not None and not _may_be_left(name, config):
            extra.append(stored_name)
    _check(named, extra, expected, path)
    if wrong := [f"{name} ({t.dtype})" for name, t in named.items() if t.dtype not in DTYPE_BYTES]:
        raise ModelLoadError(
            f"{path}: dtype of {_list(wrong)} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return named


def name_gguf(stored: Mapping[str, GgufTensor], config: ModelConfig, path: Path) -> dict[str, GgufTensor]:
    """As `name_safetensors`, of a GGUF file."""
    expected = expected_tensors(config)
    stored = dict(_split_experts(stored, config))
    names = {gguf_name(name): name for name in expected}
    named = {names[name]: tensor for name, tensor in stored.items() if name in names}
    extra = [name for name in stored if name not in names and name not in GGUF_EXTRAS]
    _check(named, extra, expected, path)
    return named


def _split_experts(stored: Mapping[str, GgufTensor], config: ModelConfig) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors with those of all experts in one cut apart: `ffn_up_exps.weight` is `ffn_up.0.weight` and so on."""
    num_experts = config.moe.num_experts if config.moe is not None else 0
    for name, tensor in stored.items():
        if not name.endswith("_exps.weight") or len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            yield name, tensor
            continue
        size = tensor.num_bytes // num_experts
        for i in range(num_experts):
            offset = tensor.offset_bytes + i * size
            part = replace(tensor, shape=tensor.shape[1:], offset_bytes=offset, num_bytes=size)
            yield name.replace("_exps.", f".{i}."), part


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor that transformers calls `name`; of an expert's, see `_split_experts`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        if part.startswith("mlp.experts."):
            expert, _, projection = part.removeprefix("mlp.experts.").partition(".")
            return f"blk.{number}.{GGUF_NAMES[f'mlp.{projection}']}.{expert}.{kind}"
        return f"blk.{number}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def text_name(stored_name: str, config: ModelConfig) -> str | None:
    """The text model's name of a stored tensor; None when it belongs to another part."""
    if not config.is_text_part:
        return stored_name
    if stored_name.startswith(IMAGE_PREFIXES):
        return None
    for prefix, replacement in TEXT_PREFIXES:
        if stored_name.startswith(prefix):
            return replacement + stored_name.removeprefix(prefix)
    return stored_name


def _check(
    named: Mapping[str, StoredTensor] | Mapping[str, GgufTensor],
    extra: list[str],
    expected: Mapping[str, Shape],
    path: Path,
) -> None:
    if missing := [name for name in expected if name not in named]:
        raise ModelLoadError(f"{path} lacks {len(missing)} tensors: {_list(missing)}")
    if extra:
        raise ModelLoadError(f"{path} holds {len(extra)} tensors that the model has no place for: {_list(extra)}")
    for name, tensor in named.items():
        if tensor.shape != expected[name]:
            raise ModelLoadError(f"{path}: {name} has the shape {tensor.shape}, expected {expected[name]}")


def _may_be_left(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold `name` without the model wanting it: a tied head, or a buffer that is computed."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _list(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:NUM_NAMED])
