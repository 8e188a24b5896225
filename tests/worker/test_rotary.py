"""The table of cosines and sines of every kind of rotary embedding against transformers' own, in old keys and new."""

import json
from pathlib import Path

import pytest
import torch

from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile
from minisgl.model_config import ModelConfig, read_config
from minisgl.rope_config import ROPE_KINDS
from minisgl_worker.rotary import build_rotary_tables
from tests.worker.checkpoints import KINDS, TINY

POSITIONS = 512
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn beta": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False,
    },
    "yarn attention factor": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "attention_factor": 0.7,
    },
    "yarn mscale": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "mscale": 0.8, "mscale_all_dim": 1.2,
    },
}  # fmt: skip


def write_config(folder: Path, architecture: str, old_keys: bool, **overrides: object) -> Path:
    """config.json as transformers writes it, or in the layout of its version 4."""
    from transformers import AutoConfig

    kind, values = KINDS[architecture]
    values = {**TINY, "max_position_embeddings": POSITIONS, **values, **overrides}
    config = json.loads(AutoConfig.for_model(kind, **values).to_json_string(use_diff=False))
    config["architectures"] = [architecture]
    if old_keys:
        rope = config.pop("rope_parameters")
        if "full_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        elif rope["rope_type"] != "default":
            rope["type"] = rope.pop("rope_type")  # older still; Gemma never had it
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if len(rope) > 1 else None
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> ModelConfig:
    return read_config(JsonFile(folder / "config.json"))


def table(config: ModelConfig, layer: int = 0) -> torch.Tensor:
    return build_rotary_tables(config, POSITIONS, torch.float32, torch.device("cpu"))[layer]


def reference_table(folder: Path, layer_type: str | None = None) -> torch.Tensor:
    """[POSITIONS, head_dim]: the halves that differ of what transformers multiplies with."""
    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = (LlamaRotaryEmbedding if layer_type is None else Gemma3RotaryEmbedding)(AutoConfig.from_pretrained(folder))
    positions = torch.arange(POSITIONS)[None]
    with torch.no_grad():
        cos, sin = module(torch.zeros(1), positions, *(() if layer_type is None else (layer_type,)))
    half = cos.shape[-1] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("old_keys", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_table_equals_that_of_transformers(tmp_path: Path, name: str, old_keys: bool) -> None:
    folder = write_config(tmp_path / "m", "LlamaForCausalLM", old_keys, rope_parameters=dict(ROPES[name]))
    config = read(folder)
    assert config.rope.kind == ROPES[name]["rope_type"]
    assert (table(config) - reference_table(folder)).abs().max() < 1e-6


@pytest.mark.parametrize("old_keys", [False, True])
def test_tables_of_gemma_differ_by_layer(tmp_path: Path, old_keys: bool) -> None:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}, "full_attention": ROPES["linear"]}
    folder = write_config(tmp_path / "m", "Gemma3ForCausalLM", old_keys, rope_parameters=ropes)
    config = read(folder)
    assert config.layer_windows == (12, 12, None, 12)
    for layer, kind in ((0, "sliding_attention"), (2, "full_attention")):
        assert (table(config, layer) - reference_table(folder, kind)).abs().max() < 1e-6
    assert table(config, 0) is not table(config, 2)


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    folder = write_config(tmp_path / "m", "LlamaForCausalLM", old_keys=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": kind}}))
    with pytest.raises(ModelLoadError, match=f"{kind}.*{', '.join(ROPE_KINDS)}"):
        read(folder)


def test_context_limit_is_that_of_the_table(tmp_path: Path) -> None:
    """Dynamic scaling is not served past the trained length; yarn is served to the length after scaling."""
    for name, limit in (("default", POSITIONS), ("dynamic", POSITIONS), ("yarn", POSITIONS)):
        folder = write_config(tmp_path / name, "LlamaForCausalLM", old_keys=True, rope_parameters=dict(ROPES[name]))
        assert read(folder).max_position_embeddings == limit
    longer = {**ROPES["yarn"], "original_max_position_embeddings": POSITIONS}
    folder = write_config(tmp_path / "longer", "LlamaForCausalLM", old_keys=True, rope_parameters=longer)
    assert read(folder).max_position_embeddings == 4 * POSITIONS
