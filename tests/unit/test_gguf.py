"""GGUF files: config and tensors from their headers, and what is refused by name."""

import re
import struct

import pytest
from model_folders import (
    FLOAT32,
    GGUF_METADATA,
    GGUF_TENSORS,
    STRING,
    UINT32,
    write_gguf,
)

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufHeader
from minisgl.model_config import MoeConfig
from minisgl.model_folder import resolve_model
from minisgl.rope_config import RopeConfig


def test_read_of_gguf_gives_config_and_end_ids(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    model = resolve_model(str(path))
    config = model.config
    assert model.is_gguf and model.weight_files == (path,) and model.stop_ids == (2, 5)
    assert (config.architecture, config.vocab_size, config.num_layers, config.hidden_size) == (
        "LlamaForCausalLM",
        320,
        2,
        64,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 16, 128)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (5e5, 2.0**-17, 512)
    assert (config.dtype, config.tie_word_embeddings) == ("float16", False)


def test_read_of_gguf_that_is_its_only_part_is_whole(tmp_path):
    for count in (0, 1):
        assert resolve_model(str(write_gguf(tmp_path / "m.gguf", split__count=(UINT32, count)))).tensors


def test_read_of_gguf_without_output_is_tied(tmp_path):
    tied = {name: shape for name, shape in GGUF_TENSORS.items() if name != "output.weight"}
    path = write_gguf(tmp_path / "m.gguf", tensors=tied)
    assert resolve_model(str(path)).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope__scaling__type": (STRING, "none")}, RopeConfig("default", 5e5)),
        ({"rope__scale_linear": (FLOAT32, 2.0)}, RopeConfig("linear", 5e5, {"factor": 2.0})),
        (
            {"rope__scaling__type": (STRING, "linear"), "rope__scaling__factor": (FLOAT32, 4.0)},
            RopeConfig("linear", 5e5, {"factor": 4.0}),
        ),
        (
            {
                "rope__scaling__type": (STRING, "yarn"),
                "rope__scaling__factor": (FLOAT32, 4.0),
                "rope__scaling__original_context_length": (UINT32, 128),
                "rope__scaling__yarn_beta_fast": (FLOAT32, 16.0),
            },
            RopeConfig("yarn", 5e5, {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}),
        ),
    ],
)
def test_read_of_gguf_scaling(tmp_path, changes, rope):
    path = write_gguf(tmp_path / "m.gguf", **{f"llama__{key}": value for key, value in changes.items()})
    config = resolve_model(str(path)).config
    assert config.rope == config.windowed_rope == rope and config.max_position_embeddings == 512


def test_read_of_gguf_divisors(tmp_path):
    """Llama 3.1's scaling is in the file as its outcome."""
    path = write_gguf(tmp_path / "m.gguf", tensors={**GGUF_TENSORS, "rope_freqs.weight": (8,)})
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight holds 0\.0"):
        resolve_model(str(path))
    data = path.read_bytes()
    path.write_bytes(data[:-32] + struct.pack("<8f", *range(1, 9)))
    assert resolve_model(str(path)).config.rope == RopeConfig("divisors", 5e5, {"divisors": (1, 2, 3, 4, 5, 6, 7, 8)})


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("mistral3", "MistralForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_read_of_gguf_architectures(tmp_path, name, architecture):
    values = {key.replace("llama.", f"{name}.").replace(".", "__"): value for key, value in GGUF_METADATA.items()}
    values["general__architecture"] = (STRING, name)
    tensors = dict(GGUF_TENSORS)
    if name == "qwen2":
        tensors |= {f"blk.{i}.attn_{part}.bias": (64 if part == "q" else 32,) for i in range(2) for part in "qkv"}
    if name == "qwen3":
        values["qwen3__attention__key_length"] = (UINT32, 16)
        tensors |= {f"blk.{i}.attn_{part}_norm.weight": (16,) for i in range(2) for part in "qk"}
    model = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors=tensors, **values)))
    assert model.config.architecture == architecture and len(model.tensors) == len(tensors)
    assert model.config.layer_windows == (None, None)


def test_read_of_gguf_llama_with_a_window_is_mistral(tmp_path):
    config = resolve_model(str(write_gguf(tmp_path / "m.gguf", llama__attention__sliding_window=(UINT32, 9)))).config
    assert (config.architecture, config.layer_windows) == ("MistralForCausalLM", (9, 9))


def test_gguf_tensors_that_do_not_fit_are_named(tmp_path):
    less = {name: shape for name, shape in GGUF_TENSORS.items() if name != "blk.1.ffn_up.weight"}
    for tensors, text in (
        (less, "lacks 1 tensors: model.layers.1.mlp.up_proj.weight"),
        ({**GGUF_TENSORS, "blk.0.more": (4,)}, "holds 1 tensors that the model has no place for: blk.0.more"),
        ({**GGUF_TENSORS, "output_norm.weight": (4,)}, "model.norm.weight has the shape (4,), expected (64,)"),
    ):
        with pytest.raises(ModelLoadError, match=re.escape(text)):
            resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors=tensors)))


def test_gguf_header_reads_arrays_and_places(tmp_path):
    header = GgufHeader(write_gguf(tmp_path / "m.gguf"))
    assert header.get_strings("tokenizer.ggml.tokens") == ["a", "日本", ""]
    assert header.get_numbers("tokenizer.ggml.token_type") == [1, 3, 1]
    assert header.get_strings("no.such") == [] and header.get_numbers("tokenizer.ggml.tokens") == []
    one, two = header.tensors["token_embd.weight"], header.tensors["blk.0.attn_q.weight"]
    assert one.shape == (320, 64) and one.num_bytes == 4 * 320 * 64
    assert one.offset_bytes % 32 == 0 and two.offset_bytes == one.offset_bytes + one.num_bytes
    last = header.tensors["output.weight"]
    assert last.offset_bytes + last.num_bytes == (tmp_path / "m.gguf").stat().st_size


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"version": 9}, ["version 9"]),
        ({"counts": (2**60, 2)}, [str(2**60)]),
        ({"counts": (1, 2**60)}, [str(2**60)]),
        ({"general__architecture": (STRING, "gpt2")}, ["gpt2", "llama", "qwen3"]),
        ({"general__architecture": None}, ["None", "llama"]),
        ({"llama__block_count": None}, ["num_hidden_layers"]),
        ({"llama__attention__head_count": (FLOAT32, 4.0)}, ["num_attention_heads", "4.0"]),
        ({"llama__rope__dimension_count": (UINT32, 8)}, ["rope.dimension_count", "8"]),
        ({"llama__rope__scaling__type": (STRING, "longrope")}, ["rope.scaling.type", "longrope", "yarn"]),
        ({"llama__rope__scaling__type": (STRING, "yarn")}, ["rope.scaling.factor", "None"]),
        ({"llama__expert_count": (UINT32, 8)}, ["expert_count", "8"]),
        ({"split__count": (UINT32, 3)}, ["one of 3 parts", "split.count", "merge"]),
        ({"llama__attention__temperature_scale": (FLOAT32, 0.5)}, ["temperature_scale", "0.5"]),
        ({"general__alignment": (UINT32, 33)}, ["alignment", "33"]),
        ({"tensors": {"x": (64, 320)}}, ["token_embd.weight"]),
        ({"tensors": {**GGUF_TENSORS, "rope_freqs.weight": (8, 1)}}, ["rope_freqs.weight"]),
        ({"tensors": {"token_embd.weight": (0, 320)}}, ["token_embd.weight"]),
    ],
)
def test_read_of_a_bad_gguf_names_it(tmp_path, changes, parts):
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(path))
    for part in ("m.gguf", *parts):
        assert part in str(caught.value)


def test_read_of_a_cut_gguf_is_refused_at_every_length(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    header_size = GgufHeader(path).tensors["token_embd.weight"].offset_bytes
    for size in [*range(header_size + 1), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            resolve_model(str(path))


def test_read_of_gguf_with_a_string_longer_than_the_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    for length in (2**63, 2**64 - 1, 2**40):
        data = bytearray(path.read_bytes())
        data[24:32] = struct.pack("<Q", length)
        (tmp_path / "n.gguf").write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"n\.gguf"):
            resolve_model(str(tmp_path / "n.gguf"))


def test_read_of_gguf_with_an_array_past_the_end_is_refused(tmp_path):
    last = "tokenizer.ggml.tokens"
    path = write_gguf(
        tmp_path / "m.gguf", tensors={}, **{key.replace(".", "__"): None for key in GGUF_METADATA if key != last}
    )
    data = path.read_bytes().rstrip(b"\0")
    place = data.rindex("日本".encode()) - 8
    path.write_bytes(data[:place] + struct.pack("<Q", 1000) + data[place + 8 :])
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*past the end"):
        GgufHeader(path)


def test_gguf_experts_of_another_number_are_named(tmp_path):
    values = {key.replace("llama.", "qwen3moe.").replace(".", "__"): value for key, value in GGUF_METADATA.items()}
    values |= {
        "general__architecture": (STRING, "qwen3moe"),
        "qwen3moe__expert_count": (UINT32, 4),
        "qwen3moe__expert_used_count": (UINT32, 2),
        "qwen3moe__expert_feed_forward_length": (UINT32, 32),
    }
    tensors = {name: shape for name, shape in GGUF_TENSORS.items() if ".ffn_" not in name or "norm" in name}
    for i in range(2):
        tensors |= {f"blk.{i}.attn_{part}_norm.weight": (16,) for part in "qk"}
        tensors |= {f"blk.{i}.ffn_gate_inp.weight": (64, 4), f"blk.{i}.ffn_down_exps.weight": (32, 64, 4)}
        tensors |= {f"blk.{i}.ffn_{part}_exps.weight": (64, 32, 4) for part in ("gate", "up")}
    model = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors=tensors, **values)))
    assert model.config.moe == MoeConfig(4, 2, 32, True, frozenset({0, 1}))
    part, next_part = (model.tensors[f"model.layers.1.mlp.experts.{i}.down_proj.weight"] for i in (2, 3))
    assert part.shape == (64, 32) and next_part.offset_bytes - part.offset_bytes == part.num_bytes == 4 * 64 * 32
    tensors["blk.1.ffn_up_exps.weight"] = (64, 32, 3)
    with pytest.raises(ModelLoadError, match=r"lacks 4 tensors: model\.layers\.1\.mlp\.experts\.0\.up_proj"):
        resolve_model(str(write_gguf(tmp_path / "n.gguf", tensors=tensors, **values)))
