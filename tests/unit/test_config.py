"""The engine's options, from keywords and from flags."""

import argparse
import re
from dataclasses import fields

import pytest

from minisgl.config import ALIASES, EngineConfig, add_engine_flags, engine_arguments, read_engine_flags

# For each option a value that is not its default.
OTHER_VALUES = {
    "dtype": "float32", "device": "cpu", "tp_size": 2, "max_running_req": 7, "max_extend_tokens": 99, "page_size": 4,
    "num_pages": 12, "memory_ratio": 0.5, "max_seq_len": 300, "cache_type": "naive", "attention_backend": "fi,triton",
    "moe_backend": "triton", "cuda_graph_bs": (1, 2), "cuda_graph_max_bs": 8, "use_dummy_weight": True, "seed": -5,
    "start_timeout_s": 3.5, "step_timeout_s": 2.5, "schedule_policy": "lof", "max_steps_in_flight": 3,
    "max_queued_req": 77, "record_steps": "/tmp/steps",
}  # fmt: skip


def read_flags(arguments: list[str]) -> EngineConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    add_engine_flags(parser)
    parsed = parser.parse_args(arguments)
    return read_engine_flags(parsed.model, parsed)


def test_other_values_name_every_option() -> None:
    defaults = {f.name: f.default for f in fields(EngineConfig) if f.name != "model"}
    assert OTHER_VALUES.keys() == defaults.keys()
    assert all(OTHER_VALUES[name] != default for name, default in defaults.items())


@pytest.mark.parametrize("name", [*OTHER_VALUES, None])
def test_flags_and_wire_give_back_the_config(name: str | None) -> None:
    options = OTHER_VALUES if name is None else {name: OTHER_VALUES[name]}
    config = EngineConfig.from_options("m", options)
    assert all(getattr(config, option) == value for option, value in options.items())
    assert read_flags(engine_arguments(config)) == config
    assert EngineConfig.from_wire(config.to_wire()) == config


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alias_sets_its_option(alias: str, name: str) -> None:
    assert getattr(EngineConfig.from_options("m", {alias: OTHER_VALUES[name]}), name) == OTHER_VALUES[name]
    with pytest.raises(TypeError, match="twice"):
        EngineConfig.from_options("m", {alias: OTHER_VALUES[name], name: OTHER_VALUES[name]})


def test_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"page_sise.*page_size"):
        EngineConfig.from_options("m", {"page_sise": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_size", 0), ("tp_size", True), ("tp_size", 1.0), ("page_size", 0), ("page_size", 1025), ("num_pages", 0),
        ("num_pages", -1), ("max_running_req", 0), ("max_running_req", 65_536), ("max_extend_tokens", 0),
        ("max_seq_len", 0), ("max_seq_len", 1),
        ("memory_ratio", 0), ("memory_ratio", 1.01), ("memory_ratio", float("nan")),
        ("memory_ratio", True), ("start_timeout_s", -1), ("step_timeout_s", float("inf")), ("dtype", "int8"),
        ("device", "tpu"), ("cache_type", "lru"), ("schedule_policy", "sjf"), ("attention_backend", "fi,fi,fi"),
        ("attention_backend", "magic"), ("moe_backend", "grouped"),
        ("cuda_graph_bs", (0,)), ("cuda_graph_max_bs", -1), ("use_dummy_weight", 1),
        ("max_steps_in_flight", 9), ("seed", 2**63),
    ],
)  # fmt: skip
def test_value_out_of_range_names_option_and_value(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig.from_options("m", {name: value})


def test_pool_too_small_for_any_request_names_the_least_that_works() -> None:
    text = "num_pages 1 with page_size 1 holds 1 token, the least that a request needs is 2 .* num_pages to at least 2$"
    with pytest.raises(ValueError, match=text):
        EngineConfig.from_options("m", {"num_pages": 1, "page_size": 1})
    for options in ({"num_pages": 2, "page_size": 1}, {"num_pages": 1, "page_size": 2}):
        assert EngineConfig.from_options("m", options).num_pages == options["num_pages"]


@pytest.mark.parametrize("model", ["", "a\0b", 5, b"ab", None, ["m"]])
def test_model_that_cannot_be_a_name_is_refused(model: object) -> None:
    with pytest.raises(ValueError, match=f"model must be a folder, a file or a name, got {re.escape(repr(model))}"):
        EngineConfig.from_options(model, {})


def test_dtype_may_be_any_object_that_prints_as_one() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    assert EngineConfig.from_options("m", {"dtype": Dtype()}).dtype == "bfloat16"
    assert EngineConfig.from_options("m", {"dtype": "half"}).dtype == "float16"
