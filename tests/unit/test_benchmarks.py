"""The workloads and the roofline that benchmark numbers rest on."""

from random import Random, randint, seed

import pytest

from minisgl.model_config import ModelConfig, MoeConfig
from minisgl.rope_config import RopeConfig
from roofline import Rates, compute_limit
from workload import CPU, HEADLINE

H200 = Rates(bytes_per_s=4.3e12, flops=790e12)


def make_config(**changes: object) -> ModelConfig:
    """The shape of Qwen3-0.6B."""
    values = dict(
        architecture="Qwen3ForCausalLM", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False,
        mlp_bias=False, hidden_act="silu", rope=RopeConfig("default", 1e6), max_position_embeddings=40_960,
        dtype="bfloat16", sliding_window=None, layer_windows=(None,) * 28,
    )  # fmt: skip
    return ModelConfig(**(values | changes))


def test_draw_headline_equals_the_published_generator():
    seed(0)
    prompts = [[randint(0, 10_000) for _ in range(randint(100, 1024))] for _ in range(256)]
    outputs = [randint(100, 1024) for _ in range(256)]
    assert HEADLINE.draw(0) == (prompts, outputs)
    assert (sum(map(len, prompts)), sum(outputs)) == (142_827, 133_966)


def test_draw_cpu_workload_has_the_stated_ranges():
    prompts, outputs = CPU.draw(0)
    assert len(prompts) == 32
    assert {len(p) for p in prompts} <= set(range(32, 257)) and set(outputs) <= set(range(32, 129))
    assert max(max(p) for p in prompts) < 49_000
    random = Random(0)
    assert prompts[0] == [random.randrange(49_000) for _ in range(random.randint(32, 256))]


def test_draw_another_repetition_has_fresh_ids_and_the_same_lengths():
    (first, outputs), (second, same_outputs) = CPU.draw(0), CPU.draw(1)
    assert [len(p) for p in first] == [len(p) for p in second] and outputs == same_outputs
    assert all(a[:16] != b[:16] for a, b in zip(first, second, strict=True))
    assert CPU.draw(1) == CPU.draw(1) != CPU.draw(-1)


@pytest.mark.parametrize(
    "changes, tokens_per_s",
    [
        ({}, 35_920),
        (
            dict(hidden_size=5120, num_heads=40, intermediate_size=17_408, num_layers=40, layer_windows=(None,) * 40),
            8_051,
        ),
    ],
)
def test_compute_limit_of_the_headline_is_the_published_one(changes, tokens_per_s):
    limit = compute_limit(make_config(**changes), *HEADLINE.draw_lengths(), H200)
    assert limit.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-3)


def test_compute_limit_of_one_request_is_reading_the_weights():
    limit = compute_limit(make_config(), [1], [101], H200)
    weight_bytes = 2 * (28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072) + 151_936 * 1024)
    assert limit.decode_s == pytest.approx(100 * weight_bytes / H200.bytes_per_s, rel=0.02)


def test_compute_limit_of_experts_counts_those_that_are_chosen():
    moe = MoeConfig(128, 8, 768, True, frozenset(range(28)))
    per_expert, rest = 3 * 1024 * 768, 1024 * 4096 + 2048 * 1024 + 1024 * 128
    one = compute_limit(make_config(moe=moe), [1], [101], H200)
    weight_bytes = 2 * (28 * (rest + 8 * per_expert) + 151_936 * 1024)
    assert one.decode_s == pytest.approx(100 * weight_bytes / H200.bytes_per_s, rel=0.02)
    many = compute_limit(make_config(moe=moe), [1] * 150, [101] * 150, H200)
    weight_bytes = 2 * (28 * (rest + 128 * per_expert) + 151_936 * 1024)
    kv_and_logit_bytes = 150 * (51 * 28 * 4096 + 4 * 151_936)
    assert many.decode_s == pytest.approx(100 * (weight_bytes + kv_and_logit_bytes) / H200.bytes_per_s, rel=0.02)


def test_compute_limit_with_a_window_reads_no_more_than_the_window():
    full, windowed = make_config(), make_config(sliding_window=128, layer_windows=(128,) * 28)
    short = compute_limit(full, [64], [32], H200)
    assert compute_limit(windowed, [64], [32], H200) == short
    assert compute_limit(windowed, [4096], [32], H200).decode_s < compute_limit(full, [4096], [32], H200).decode_s
    longer = compute_limit(windowed, [8192], [32], H200).decode_s
    assert longer == pytest.approx(compute_limit(windowed, [4096], [32], H200).decode_s)
