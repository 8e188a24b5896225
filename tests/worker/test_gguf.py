"""Models in GGUF files have the weights, and say the tokens, of the same models in safetensors."""

import json
import re
from collections import defaultdict
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.checkpoint import gguf_name
from minisgl.errors import ModelLoadError
from minisgl_worker import weights
from minisgl_worker.dequantize import dequantize
from tests.worker.checkpoints import write_checkpoint
from tests.worker.test_weights import answer, make_runner

Kind = gguf.GGMLQuantizationType
HEAD_DIM, HIDDEN = 16, 256
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 256, "head_dim": HEAD_DIM, "num_attention_heads": 16,
         "num_key_value_heads": 2, "initializer_range": 0.1}  # fmt: skip
NAMES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
         "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe"}  # fmt: skip
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def quantize(array: np.ndarray, kind: Kind) -> np.ndarray:
    """[rows, columns] f32 -> bytes. K-quants are only ever read here: theirs are random, with scales that are sane."""
    if kind.name not in K_QUANTS:
        return gguf.quants.quantize(array, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    raw = random.integers(0, 256, (array.size // block, size), np.uint8)
    scales = random.uniform(1e-4, 1e-3, (len(raw), 2)).astype(np.float16).view(np.uint8)
    at = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}[kind.name]  # of the fp16 scales in a block
    width = 2 if kind.name in ("Q3_K", "Q6_K") else 4
    raw[:, at : at + width] = scales[:, :width]
    return raw.reshape(array.shape[0], -1)


def reorder(array: np.ndarray) -> np.ndarray:
    """Rows of q or k in the order in which llama's files have them: values that rotate together are neighbours."""
    return np.ascontiguousarray(
        array.reshape(-1, 2, HEAD_DIM // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    )


def restore(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, HEAD_DIM // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def convert(folder: Path, file: Path, architecture: str, kind: Kind, divisors: list[float] | None = None) -> None:
    """Write the folder's model as llama.cpp would, and change the folder's weights to what can be read back."""
    name = NAMES[architecture]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, name)
    for key, value in (("context_length", 256), ("embedding_length", HIDDEN), ("block_count", 2),
                       ("feed_forward_length", 256), ("head_count", 16), ("head_count_kv", 2),
                       ("key_length", HEAD_DIM)):  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    writer.add_layer_norm_rms_eps(2.0**-20)
    writer.add_rope_freq_base(10000.0)
    if config.get("sliding_window") and architecture == "MistralForCausalLM":
        writer.add_sliding_window(config["sliding_window"])
    if name == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    tensors = load_file(folder / "model.safetensors")
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)  # of all experts in one
    for tensor_name, tensor in tensors.items():
        array = tensor.numpy()
        is_rotated = name == "llama" and any(part in tensor_name for part in (".q_proj.", ".k_proj."))
        stored = reorder(array) if is_rotated else array
        if tensor.dim() < 2:
            writer.add_tensor(gguf_name(tensor_name), stored)
            continue
        raw = quantize(stored, kind)
        back = gguf.quants.dequantize(raw, kind).reshape(array.shape)
        tensors[tensor_name] = torch.from_numpy((restore(back) if is_rotated else back).copy())
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", tensor_name):
            stacks[f"blk.{found[1]}.ffn_{found[3]}_exps.weight"][int(found[2])] = raw
        else:
            writer.add_tensor(gguf_name(tensor_name), raw, raw_dtype=kind)
    for stack_name, raws in stacks.items():
        writer.add_tensor(stack_name, np.stack([raws[i] for i in range(len(raws))]), raw_dtype=kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2.0**-20}))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS])
def test_gguf_of_every_type_gives_the_same_weights(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM", **SHAPE)
    convert(folder, tmp_path / "m.gguf", "LlamaForCausalLM", Kind[kind])
    expected = load_file(folder / "model.safetensors")
    got = {source.name: source.target for source in make_runner(tmp_path / "m.gguf")._model.weights()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("MistralForCausalLM", {"sliding_window": 5}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 64}),
    ],
)
def test_gguf_of_every_architecture_gives_the_tokens_of_the_same_weights(
    tmp_path: Path, architecture: str, overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "m", architecture, **{**SHAPE, **overrides})
    convert(folder, tmp_path / "m.gguf", architecture, Kind.Q8_0)
    expected = answer(folder)
    assert answer(tmp_path / "m.gguf") == expected
    monkeypatch.setattr(weights, "BUFFER_BYTES", 20_000)  # heads of q and k in several parts
    assert answer(tmp_path / "m.gguf") == expected


def test_gguf_divisors_rotate_as_llama3_scaling_does(tmp_path: Path) -> None:
    """The file has the outcome of the scaling for each pair of values."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM", **SHAPE, rope_parameters=rope)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), torch.device("cpu"))
    plain = 1e4 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    convert(folder, tmp_path / "m.gguf", "LlamaForCausalLM", Kind.F32, (plain / scaled).tolist())
    assert answer(tmp_path / "m.gguf") == answer(folder)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS])
def test_dequantized_values_are_bit_by_bit_those_of_the_gguf_package(kind: str) -> None:
    """Of any bytes, with every byte in every place of a block."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(0).integers(0, 256, 4096 * size, np.uint8)
    with np.errstate(all="ignore"):
        got = dequantize(torch.from_numpy(raw), Kind[kind].value)
        want = gguf.quants.dequantize(raw.reshape(1, -1), Kind[kind]).flatten()
    assert got.dtype == torch.float32 and len(got) == 4096 * block
    assert np.array_equal(got.numpy(), want, equal_nan=True)


def test_gguf_of_a_type_that_is_not_supported_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM", **SHAPE)
    convert(folder, tmp_path / "m.gguf", "LlamaForCausalLM", Kind.TQ1_0)
    with pytest.raises(ModelLoadError, match="unsupported GGML type 34"):
        answer(tmp_path / "m.gguf")
