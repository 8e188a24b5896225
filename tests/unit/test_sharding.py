"""How sizes are divided among ranks, and the one error of all that do not divide."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG

from minisgl.errors import ModelLoadError
from minisgl.json_file import JsonFile
from minisgl.model_config import ModelConfig, read_config
from minisgl.sharding import RankSizes, divide_model

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def make_model(**changes: Any) -> ModelConfig:
    """12 query heads of 8, 6 KV heads, 48 MLP columns, 2 layers; `changes` are to config.json."""
    sizes = {
        "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8, "intermediate_size": 48,
    }  # fmt: skip
    return read_config(JsonFile(Path("config.json"), {**CONFIG, **sizes, **changes}))


@pytest.mark.parametrize(
    ("tp_size", "expected"),
    [
        (1, RankSizes(12, 6, 48, 0)),
        (2, RankSizes(6, 3, 24, 0)),
        (6, RankSizes(2, 1, 8, 0)),
        (12, RankSizes(1, 1, 4, 0)),
    ],
)
def test_divide_gives_equal_parts_and_replicates_kv_heads(tp_size: int, expected: RankSizes) -> None:
    assert divide_model(make_model(), tp_size) == expected


@pytest.mark.parametrize(
    ("changes", "tp_size", "text"),
    [
        ({}, 5, "12 attention heads do not divide over tp_size 5; use tp_size 1 or 2 or 3 or 6 or 12"),
        ({}, 24, "12 attention heads do not divide over tp_size 24; use tp_size 1 or 2 or 3 or 6 or 12"),
        ({}, 4, "6 KV heads do not divide over tp_size 4; use tp_size 1 or 2 or 3 or 6 or 12"),
        (
            {"intermediate_size": 50}, 3,
            "50 MLP columns (intermediate_size) do not divide over tp_size 3; use tp_size 1 or 2",
        ),
        (
            {**MOE, "moe_intermediate_size": 20}, 3,
            "20 expert columns (moe_intermediate_size) do not divide over tp_size 3; use tp_size 1 or 2",
        ),
        (
            {**MOE, "mlp_only_layers": [0], "intermediate_size": 7}, 2,
            "7 MLP columns (intermediate_size) do not divide over tp_size 2; use tp_size 1",
        ),
    ],
)  # fmt: skip
def test_divide_of_what_does_not_names_it_and_what_would(changes: dict[str, Any], tp_size: int, text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        divide_model(make_model(**changes), tp_size)
    assert str(caught.value) == text


def test_divide_ignores_mlp_columns_that_no_layer_has() -> None:
    assert divide_model(make_model(**MOE, intermediate_size=7), 2) == RankSizes(6, 3, 0, 12)
