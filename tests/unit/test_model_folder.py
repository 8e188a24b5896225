"""A model folder is read in every layout, and refused by the name of what is wrong."""

import json
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
    write_folder,
    write_gguf,
    write_json,
    write_safetensors,
)

from minisgl.errors import ModelLoadError
from minisgl.gguf_header import GgufHeader
from minisgl.model_folder import SUPPORTED_ARCHITECTURES, resolve_model

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
        ({"sliding_window": 32, "use_sliding_window": True}, (32, 32)),
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


@pytest.mark.parametrize(
    "changes, parts",
    [
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


def test_weight_files_follow_the_index(tmp_path):
    folder = write_folder(tmp_path)
    for name in ("a-1.safetensors", "a-2.safetensors", "stray.safetensors"):
        write_safetensors(folder / name)
    write_index(folder, {"x": "a-2.safetensors", "y": "a-1.safetensors", "z": "a-2.safetensors"})
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["a-1.safetensors", "a-2.safetensors"]


def test_weight_files_without_an_index_are_the_one_or_all(tmp_path):
    folder = write_folder(tmp_path)
    write_safetensors(folder / "consolidated.safetensors")
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["model.safetensors"]
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["b.safetensors", "consolidated.safetensors"]


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
    path = write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": (64, 320)})
    assert resolve_model(str(path)).config.tie_word_embeddings


def test_gguf_header_reads_arrays_and_places(tmp_path):
    header = GgufHeader(write_gguf(tmp_path / "m.gguf"))
    assert header.get_strings("tokenizer.ggml.tokens") == ["a", "日本", ""]
    assert header.get_numbers("tokenizer.ggml.token_type") == [1, 3, 1]
    assert header.get_strings("no.such") == [] and header.get_numbers("tokenizer.ggml.tokens") == []
    one, two = header.tensors["token_embd.weight"], header.tensors["output.weight"]
    assert one.shape == (320, 64) and one.num_bytes == 4 * 320 * 64
    assert one.offset_bytes % 32 == 0 and two.offset_bytes == one.offset_bytes + one.num_bytes
    assert two.offset_bytes + two.num_bytes == (tmp_path / "m.gguf").stat().st_size


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
