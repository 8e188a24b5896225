"""A model folder is read in every layout, and refused by the name of what is wrong."""

import json
import os
from pathlib import Path

import pytest
from model_folders import (
    CONFIG,
    list_tensors,
    write_folder,
    write_json,
    write_safetensors,
)

from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile
from minisgl.model_config import MoeConfig, read_config
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


NULLABLE = (
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "hidden_act", "hidden_activation", "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor", "dtype", "torch_dtype", "layer_types", "sliding_window_pattern", "max_window_layers",
    "use_sliding_window", "query_pre_attn_scalar", "quantization_config", "attn_logit_softcapping", "eos_token_id",
    "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob",
)  # fmt: skip


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_read_of_null_is_as_of_nothing(architecture):
    """But for sliding_window, where null says that there is none (see the test of Mistral's windows)."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    stated = {**CONFIG, **experts, "architectures": [architecture], "use_sliding_window": True, "sliding_window": 8}
    nullable = NULLABLE
    if architecture == "Ministral3ForCausalLM":  # it cannot do without
        rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
        stated["rope_parameters"] = {"rope_theta": 1e4, **rope}
        nullable = tuple(key for key in NULLABLE if key != "rope_parameters")
    inner = {**stated, "model_type": "gemma3_text" if "Gemma3" in architecture else "mistral"}
    for key in nullable:
        without = {k: v for k, v in stated.items() if k != key}
        text = {k: v for k, v in inner.items() if k != key}
        expected = read_config(JsonFile(Path("c"), {**without, "text_config": text}))
        assert read_config(JsonFile(Path("c"), {**without, key: None, "text_config": {**text, key: None}})) == expected


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
        tmp_path, architectures=["Mistral3ForConditionalGeneration"], text_config={"model_type": "mistral4"}
    )
    with pytest.raises(
        ModelLoadError, match=r"text_config\.model_type is 'mistral4', expected one of mistral, ministral3"
    ):
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
        ({"architectures": ["Ministral3ForCausalLM"]}, ["rope_parameters.llama_4_scaling_beta is missing"]),
        (
            {
                "architectures": ["Ministral3ForCausalLM"],
                "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1},
            },
            ["rope_parameters.original_max_position_embeddings is missing"],
        ),
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


def test_resolve_of_another_file_is_refused_and_its_folder_named_if_it_is_one(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    for name in (str(tmp_path / "model.bin"), os.devnull):
        with pytest.raises(ModelLoadError, match=rf"^{name} is neither a model folder nor a \.gguf file$"):
            resolve_model(name)
    folder = write_folder(tmp_path / "m")
    with pytest.raises(ModelLoadError, match=rf"safetensors is neither .*; give its folder, {folder}$"):
        resolve_model(str(folder / "model.safetensors"))


def test_config_of_the_tests_is_sound(tmp_path):
    assert read(write_folder(tmp_path)).vocab_size == CONFIG["vocab_size"]


def test_of_a_hub_repository_only_what_is_read_is_fetched(tmp_path, monkeypatch):
    """The client of the Hub gets patterns; its own filter says what they mean."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    read = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "vocab.txt",
    ]  # fmt: skip
    weights = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = [
        "pytorch_model.bin", "modeling_llama.py", "README.md", "LICENSE.txt", "model.gguf", "consolidated.safetensors",
        "original/consolidated.00.pth", "onnx/config.json", "fp8/model.safetensors", "tf_model.h5", ".gitattributes",
    ]  # fmt: skip
    fetched = []

    def fetch(repo_id, **patterns):
        fetched.append(list(filter_repo_objects([*others, *read, *weights], **patterns)))
        return str(write_folder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    resolve_model("owner/name")
    resolve_model("owner/name", need_weights=False)
    assert fetched == [[*read, *weights], [*read, weights[0]]]
