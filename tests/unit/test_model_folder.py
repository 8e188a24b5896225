"""A model folder is read in every layout, and refused by the name of what is wrong."""

import json
import re
import struct
from pathlib import Path

import pytest
from model_folders import (
    CONFIG,
    FLOAT32,
    GGUF_METADATA,
    GGUF_TENSORS,
    STRING,
    UINT32,
    list_tensors,
    write_folder,
    write_gguf,
    write_json,
    write_safetensors,
)

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufHeader
from minisgl.model_config import MoeConfig
from minisgl.model_folder import SUPPORTED_ARCHITECTURES, resolve_model
from minisgl.rope_config import RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


def read(folder: Path):
    return resolve_model(str(folder)).config


def test_read_of_both_key_layouts_is_the_same(tmp_path):
    new = write_folder(tmp_path / "new", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    old = write_folder(tmp_path / "old", rope_parameters=None, dtype=None)
    values = json.loads((old / "config.json").read_text())
    write_json(old / "config.json", {**values, "rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "float32"})
    assert read(new) == read(old)
    assert (read(new).rope.kind, read(new).rope.theta, read(new).dtype) == ("llama3", 5e5, "float32")
    assert read(new).rope.parameters == {k: v for k, v in LLAMA3.items() if k != "rope_type"}


def test_read_fills_in_what_is_unstated(tmp_path):
    config = read(write_folder(tmp_path, rope_parameters=None, dtype=None, num_key_value_heads=None, rms_norm_eps=None))
    assert (config.rope.kind, config.rope.theta, config.dtype) == ("default", 10_000.0, "bfloat16")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.layer_windows == (None, None)


@pytest.mark.parametrize("stated, head_dim", [({}, 16), ({"head_dim": 32}, 32), ({"head_dim": None}, 16)])
def test_read_takes_the_stated_head_dim(tmp_path, stated, head_dim):
    assert read(write_folder(tmp_path, **stated)).head_dim == head_dim


def test_read_of_qwen3_without_head_dim_takes_the_family_one(tmp_path):
    assert read(write_folder(tmp_path, **QWEN3)).head_dim == 128


@pytest.mark.parametrize("scaling", [{"type": "yarn"}, {"rope_type": "yarn"}, {"type": "yarn", "rope_type": "yarn"}])
def test_read_of_yarn_extends_the_positions_under_either_key(tmp_path, scaling):
    scaling = {**scaling, "factor": 4.0, "original_max_position_embeddings": 512}
    config = read(write_folder(tmp_path, rope_parameters=None, rope_scaling=scaling))
    assert (config.rope.kind, config.max_position_embeddings) == ("yarn", 2048)
    assert config.rope.parameters == {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_read_of_no_scaling_is_default(tmp_path, scaling):
    assert read(write_folder(tmp_path, rope_parameters=None, rope_scaling=scaling)).rope.kind == "default"


@pytest.mark.parametrize(
    "keys, windows",
    [
        ({"sliding_window": 32}, (None, None)),
        ({"sliding_window": 32, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 32, "use_sliding_window": True}, (None, None)),  # from layer 28 on
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}, (32, 32)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (None, 32)),
        (
            {"sliding_window": 32, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (32, None),
        ),
    ],
)
def test_read_of_windows_is_per_layer(tmp_path, keys, windows):
    assert read(write_folder(tmp_path, **QWEN3, **keys)).layer_windows == windows
    assert read(write_folder(tmp_path, **keys)).layer_windows == (None, None)  # Llama has none


@pytest.mark.parametrize(
    "config_eos, generation, expected",
    [
        (257, None, (257,)),
        ([257, 5], {"eos_token_id": 6}, (5, 6, 257)),
        (None, {"eos_token_id": [6, 7]}, (6, 7)),
        (9999, {"bos_token_id": 1}, ()),
        (None, None, ()),
    ],
)
def test_stop_ids_are_those_of_all_files(tmp_path, config_eos, generation, expected):
    folder = write_folder(tmp_path, eos_token_id=config_eos)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    assert resolve_model(str(folder)).stop_ids == expected


def test_read_of_windows_of_mistral_is_all_layers_or_none(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2}
    assert read(write_folder(tmp_path, **mistral)).layer_windows == (4096, 4096)  # its default
    assert read(write_folder(tmp_path, **mistral, sliding_window=8)).layer_windows == (8, 8)
    write_json(tmp_path / "config.json", {**CONFIG, **mistral, "sliding_window": None})
    assert read(tmp_path).layer_windows == (None, None)


def test_read_of_gemma3_in_the_old_layout(tmp_path):
    """As gemma-3-4b-it has it: text_config leaves most to the family."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    write_json(tmp_path / "config.json", {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "float16",
        "vision_config": {"hidden_size": 1152}, "text_config": text,
    })  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", list_tensors(tmp_path))
    model = resolve_model(str(tmp_path))
    config = model.config
    assert model.stop_ids == (1, 106)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (2560, 8, 4, 256)
    assert (config.vocab_size, config.hidden_act, config.dtype) == (262_208, "gelu_pytorch_tanh", "float16")
    assert config.layer_windows == (1024,) * 5 + (None, 1024)
    assert config.rope == RopeConfig("linear", 1e6, {"factor": 8.0})
    assert config.windowed_rope == RopeConfig("default", 1e4)
    assert config.tie_word_embeddings and config.query_pre_attn_scalar == 256


def test_text_config_of_another_model_is_refused(tmp_path):
    folder = write_folder(
        tmp_path, architectures=["Mistral3ForConditionalGeneration"], text_config={"model_type": "ministral3"}
    )
    with pytest.raises(ModelLoadError, match=r"text_config\.model_type is 'ministral3', expected one of mistral"):
        read(folder)


def test_read_of_experts(tmp_path):
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "num_hidden_layers": 5}  # fmt: skip
    assert read(write_folder(tmp_path, **moe)).moe == MoeConfig(8, 2, 32, False, frozenset(range(5)))
    new = {**moe, "num_experts": None, "num_local_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read(write_folder(tmp_path, **new)).moe == MoeConfig(4, 2, 32, False, frozenset({1}))


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["num_local_experts is missing"]),
        ({"architectures": ["Mistral3ForConditionalGeneration"]}, ["text_config is missing"]),
        ({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta", "0.1"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": None}, SUPPORTED_ARCHITECTURES),
        ({"architectures": "LlamaForCausalLM"}, SUPPORTED_ARCHITECTURES),
        ({"architectures": [["x"]]}, SUPPORTED_ARCHITECTURES),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"vocab_size": -5}, ["vocab_size", "-5"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"hidden_size": 10**12}, ["hidden_size", str(10**12)]),
        ({"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", str(10**9)]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "64"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key-value heads"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"head_dim": "16"}, ["head_dim", "'16'"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps"]),
        ({"max_position_embeddings": None}, ["max_position_embeddings"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"eos_token_id": "x"}, ["eos_token_id", "'x'"]),
        ({"eos_token_id": [-1]}, ["eos_token_id", "-1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "[1]"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["longrope", "yarn"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["rope_type"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, ["rope_parameters.factor", "0"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": "8"}}, ["rope_parameters.factor", "'8'"]),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, ["low_freq_factor", "missing"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["rope_theta", "-1.0"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_resolve_names_file_key_and_value(tmp_path, changes, parts):
    folder = write_folder(tmp_path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(folder))
    for part in ("config.json", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\xff\xfe", '{"a": NaN'])
def test_resolve_of_a_broken_config_names_it(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_resolve_of_an_infinite_number_is_refused(tmp_path):
    folder = write_folder(tmp_path, rms_norm_eps=float("nan"))
    with pytest.raises(ModelLoadError, match="rms_norm_eps"):
        resolve_model(str(folder))


def test_resolve_without_config_names_it(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["no_such_model", "/no/such/place", "./a/b", "a/b/c", "no_such.gguf", "", "a b/c", "../x"]
)
def test_resolve_of_nothing_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    assert not name or name in str(caught.value)


def test_resolve_of_a_hub_id_offline_names_it():
    with pytest.raises(ModelLoadError, match="nobody/nothing-at-all"):
        resolve_model("nobody/nothing-at-all")


def test_resolve_of_another_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"model\.bin"):
        resolve_model(str(tmp_path / "model.bin"))


# --------------------------------------------------------------------------------------------------------------------
# Weights


def write_index(folder: Path, weight_map: object) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def split(folder: Path, **parts: slice) -> dict[str, str]:
    """Cut the folder's file into files of these parts of its tensors; returns the map of an index."""
    tensors = list_tensors(folder)
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    for stem, part in parts.items():
        write_safetensors(folder / f"{stem}.safetensors", {name: tensors[name] for name in names[part]})
    return {name: f"{stem}.safetensors" for stem, part in parts.items() for name in names[part]}


def test_weight_files_follow_the_index_and_tell_of_stray_ones(tmp_path, caplog):
    folder = write_folder(tmp_path)
    write_index(folder, split(folder, b=slice(0, None, 2), a=slice(1, None, 2)))
    write_safetensors(folder / "stray.safetensors")
    model = resolve_model(str(folder))
    assert [p.name for p in model.weight_files] == ["a.safetensors", "b.safetensors"]
    assert model.tensors.keys() == list_tensors(folder).keys()
    assert "ignored" in caplog.text and "stray.safetensors" in caplog.text and "a.safetensors" not in caplog.text


def test_index_decides_between_two_files_that_hold_a_tensor(tmp_path):
    folder = write_folder(tmp_path)
    weight_map = split(folder, a=slice(0, 9), b=slice(8, None))
    with pytest.raises(ModelLoadError, match=r"both hold model\.layers\.0"):
        resolve_model(str(folder))
    write_index(folder, weight_map)
    shared = list(list_tensors(folder))[8]
    assert resolve_model(str(folder)).tensors[shared].file.name == "b.safetensors"


def test_index_that_names_a_tensor_of_no_file_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    write_index(folder, {**split(folder, a=slice(None)), "model.gone": "a.safetensors"})
    with pytest.raises(ModelLoadError, match=r"index\.json lists 1 tensors .* model\.gone \(a\.safetensors\)"):
        resolve_model(str(folder))


def test_weight_files_without_an_index_are_the_one_or_all(tmp_path):
    folder = write_folder(tmp_path)
    write_safetensors(folder / "consolidated.safetensors")
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["model.safetensors"]
    (folder / "consolidated.safetensors").unlink()
    split(folder, b=slice(3), c=slice(3, None))
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["b.safetensors", "c.safetensors"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: [t.pop(name) for name in list(t) if ".0." in name],
            "lacks 9 tensors: model.layers.0.self_attn.q_proj",
        ),
        (lambda t: t.update({"model.more": (1,)}), "holds 1 tensors that the model has no place for: model.more"),
        (lambda t: t.update({"model.norm.weight": (5,)}), "model.norm.weight has the shape (5,), expected (64,)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, text):
    folder = write_folder(tmp_path)
    tensors = list_tensors(folder)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=re.escape(text)):
        resolve_model(str(folder))


def test_tensors_may_be_more_where_they_are_not_needed(tmp_path):
    folder = write_folder(tmp_path, tie_word_embeddings=True)
    extra = {"lm_head.weight": (320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    write_safetensors(folder / "model.safetensors", {**list_tensors(folder), **extra})
    assert resolve_model(str(folder)).tensors.keys() == list_tensors(folder).keys()


def test_dtypes_that_are_not_supported_are_named(tmp_path):
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ModelLoadError, match=r"model\.embed_tokens\.weight \(I32\).*F64, F32, F16, BF16"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "weight_map, part",
    [
        ({"x": "gone.safetensors"}, "gone.safetensors"),
        ({"x": "../model.safetensors"}, "../model.safetensors"),
        ({"x": "/etc/passwd"}, "/etc/passwd"),
        ({"x": "model.bin"}, "model.bin"),
        ({"x": 5}, "5"),
        ({}, "weight_map"),
        ([1], "weight_map"),
    ],
)
def test_weight_files_of_a_bad_index_are_refused(tmp_path, weight_map, part):
    folder = write_folder(tmp_path)
    write_index(folder, weight_map)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(folder))
    assert part in str(caught.value) and "index.json" in str(caught.value)


def cut(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        lambda data: (2**62).to_bytes(8, "little") + data[8:],
        lambda data: (3).to_bytes(8, "little") + b"[1]",
        lambda data: data.replace(b"[0, 81920]", b"[0, 81924]", 1),  # not the size of its shape
        lambda data: data.replace(b"[0, 81920]", b"[9, 81929]", 1),  # overlaps the next one
        lambda data: data.replace(b"[0, 81920]", b"[0,  -256]", 1),
        lambda data: (8).to_bytes(8, "little") + b'{"a": 5}',
    ],
)
def test_weight_files_that_are_not_whole_are_named(tmp_path, change):
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        resolve_model(str(folder))


def test_no_weights_is_an_error_unless_none_are_needed(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), need_weights=False).weight_files == ()


def test_pickle_weights_are_refused_with_the_way_out(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*save_pretrained"):
        resolve_model(str(folder))


# --------------------------------------------------------------------------------------------------------------------
# GGUF


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


def test_read_of_gguf_without_output_is_tied(tmp_path):
    tied = {name: shape for name, shape in GGUF_TENSORS.items() if name != "output.weight"}
    path = write_gguf(tmp_path / "m.gguf", tensors=tied)
    assert resolve_model(str(path)).config.tie_word_embeddings


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
        ({"llama__rope__scaling__type": (STRING, "yarn")}, ["rope.scaling.type", "yarn"]),
        ({"llama__expert_count": (UINT32, 8)}, ["expert_count", "8"]),
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


def test_config_of_the_tests_is_sound(tmp_path):
    assert read(write_folder(tmp_path)).vocab_size == CONFIG["vocab_size"]
