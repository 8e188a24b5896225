"""The plain twins of the kernels against independent statements of what they compute."""

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from minisgl_worker.kernels.activation import gelu_mul, silu_mul
from minisgl_worker.kernels.linear import linear
from minisgl_worker.kernels.noise import gumbel, row_keys, split_seeds
from minisgl_worker.kernels.norm import add_rms_norm_reference, rms_norm, rms_norm_reference
from minisgl_worker.kernels.rope_append import qk_norm_rope_append
from minisgl_worker.kernels.sampling import combine_draws, sample

MASK = 0xFFFFFFFF


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def mix(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise_by_definition(seed, position, token):
    """Gumbel noise in Python's integers and doubles."""
    k0 = mix((seed & MASK) ^ mix((position + 0x9E3779B9) & MASK))
    k1 = mix((seed >> 32) ^ mix((k0 + 0x85EBCA6B) & MASK))
    x = (token * 0x9E3779B1 + k0) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15) ^ k1) * 0x846CA68B) & MASK
    x ^= x >> 16
    uniform = min((x + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 40_000])
def test_gumbel_any_seed_equals_definition(seed, position):
    tokens = [0, 1, 77, 151_935]
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    k0, k1 = row_keys(*split_seeds(signed), torch.tensor([position]))
    got = gumbel(k0, k1, torch.tensor(tokens, dtype=torch.int32))
    want = torch.tensor([noise_by_definition(seed, position, token) for token in tokens])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sample_many_positions_follows_softmax():
    rows, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0])
    draw = sample(logits.expand(rows, 4), torch.full((rows,), 0.7), torch.full((rows,), 99), torch.arange(rows))
    shares = torch.bincount(draw.tokens, minlength=4) / rows
    assert (shares - (logits / 0.7).softmax(0)).abs().max() < 0.015


def test_sample_row_is_the_same_alone_and_in_a_batch():
    logits, positions = torch.randn(6, 500), torch.arange(6)
    temperature, seeds = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1.0]), torch.arange(6) * 12345
    together = sample(logits, temperature, seeds, positions).tokens
    for row in range(6):
        one = slice(row, row + 1)
        assert sample(logits[one], temperature[one], seeds[one], positions[one]).tokens == together[row]


def test_sample_greedy_of_equal_logits_takes_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    zero = torch.zeros(1)
    assert sample(logits, zero, zero.long(), zero.long()).tokens.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_of_broken_row_sets_failure_and_keeps_valid_id(temperature):
    logits = torch.zeros(4, 10)
    logits[0, 3], logits[1, 3], logits[2], logits[3, 1:] = math.nan, math.inf, -math.inf, -math.inf
    draw = sample(logits, torch.full((4,), temperature), torch.arange(4), torch.arange(4))
    assert draw.failed.tolist() == [True, True, True, False]
    assert all(0 <= token < 10 for token in draw.tokens.tolist())


def test_combine_draws_of_parts_equals_whole():
    logits, rows = torch.randn(5, 300), torch.arange(5)
    logits[1, :100], logits[2], logits[3, 100:200] = -math.inf, -math.inf, math.nan
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5])
    whole = sample(logits, temperature, rows, rows)
    parts = [sample(logits[:, i : i + 100], temperature, rows, rows, i) for i in (0, 100, 200)]
    combined = combine_draws(torch.stack([p.tokens for p in parts]), torch.stack([p.scores for p in parts]))
    assert combined.failed.tolist() == whole.failed.tolist() == [False, False, True, True, False]
    assert torch.equal(combined.tokens[[0, 1, 4]], whole.tokens[[0, 1, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype):
    x, residual, norm = torch.randn(3, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype), LlamaRMSNorm(64, 1e-5)
    norm.weight.data = torch.randn(64, dtype=dtype)
    assert torch.equal(rms_norm_reference(x, norm.weight.data, 1e-5), norm(x))
    normed, total = add_rms_norm_reference(x, residual, norm.weight.data, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


def test_rms_norm_of_doubles_keeps_their_precision():
    x = torch.randn(2, 32, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, torch.ones(32, dtype=torch.float64), 1e-6), want, rtol=1e-14, atol=0)


def test_gated_activations_take_gate_then_up():
    gate, up = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(silu_mul(torch.cat([gate, up], dim=1)), gate / (1 + (-gate).exp()) * up)
    inner = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_mul(torch.cat([gate, up], dim=1)), gate * (1 + inner.tanh()) / 2 * up)


@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_append_equals_transformers(has_norm):
    tokens, heads, kv_heads, dim, page_size = 5, 4, 2, 16, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float64)
    angles = torch.rand(50, dim // 2, dtype=torch.float64) * 6
    positions, locations = torch.tensor([3, 0, 49, 7, 7]), torch.tensor([11, 0, 5, 2, 13])
    k_cache, v_cache = (torch.full((4, page_size, kv_heads, dim), 9.0, dtype=torch.float64) for _ in range(2))
    weights = [torch.randn(dim, dtype=torch.float64) if has_norm else None for _ in range(2)]
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    got = qk_norm_rope_append(qkv, *weights, 1e-6, cos_sin, positions, k_cache, v_cache, locations)

    query, key, value = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if has_norm:
        query, key = (rms_norm(x, weight, 1e-6) for x, weight in zip((query, key), weights, strict=True))
    doubled = torch.cat([angles, angles], dim=1)[positions]
    query, key = apply_rotary_pos_emb(query, key, doubled.cos(), doubled.sin(), unsqueeze_dim=1)
    torch.testing.assert_close(got, query)
    written = torch.zeros(16, dtype=torch.bool)
    written[locations] = True
    for cache, want in ((k_cache, key), (v_cache, value)):
        torch.testing.assert_close(cache.flatten(0, 1)[locations], want)
        assert (cache.flatten(0, 1)[~written] == 9.0).all()


def test_linear_adds_bias():
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
