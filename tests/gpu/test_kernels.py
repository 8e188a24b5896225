"""Triton kernels against their plain twins: compiled on a GPU, or on the CPU where TRITON_INTERPRET=1 is set."""

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")

from minisgl_worker.kernels import (  # noqa: E402
    activation_triton,
    linear_triton,
    noise,
    noise_triton,
    norm_triton,
    rope_append_triton,
    sampling_triton,
)
from minisgl_worker.kernels.activation import gelu_mul_reference, silu_mul_reference  # noqa: E402
from minisgl_worker.kernels.norm import add_rms_norm_reference, rms_norm_reference  # noqa: E402
from minisgl_worker.kernels.rope_append import qk_norm_rope_append_reference  # noqa: E402
from minisgl_worker.kernels.sampling import combine_draws, sample_reference  # noqa: E402

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter's bf16 is approximate, its fp16 exact.
DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.fixture(autouse=True)
def device():
    """Makes the tests' device the default one; a GPU lane without a GPU fails."""
    assert IS_INTERPRETED or torch.cuda.is_available(), "no NVIDIA GPU, and TRITON_INTERPRET is not 1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("cpu" if IS_INTERPRETED else "cuda") as chosen:
        yield chosen


def assert_close(got, want, tolerance=4e-3):
    """Relative error in the norm; a NaN anywhere fails."""
    assert got.shape == want.shape and got.dtype == want.dtype
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


def assert_same_rounding(got, want):
    """All but a few values are equal bit by bit: intermediate values were rounded where the twin rounds them."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got != want).double().mean() <= 0.02


def test_norms_with_fp32_weights_round_only_the_product():
    """Gemma's weights; a product of the rounded value differs in a third of the places."""
    x, weight = torch.randn(5, 200, dtype=DTYPE), torch.randn(200)
    got, want = norm_triton.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)
    assert_same_rounding(got, want)
    assert (rms_norm_reference(x, weight.to(DTYPE), 1e-6) != want).double().mean() > 0.1
    qkv, q_weight, k_weight = torch.randn(3, 6 * 16, dtype=DTYPE), torch.randn(16), torch.randn(16)
    results = []
    for kernel in (rope_append_triton.qk_norm_rope_append, qk_norm_rope_append_reference):
        caches = [torch.zeros(2, 4, 1, 16, dtype=DTYPE) for _ in range(2)]
        table = torch.cat((torch.ones(8, 8), torch.zeros(8, 8)), dim=-1)  # turns nothing
        rest = (table, torch.arange(3), *caches, torch.arange(3))
        results.append((kernel(qkv, q_weight, k_weight, 1e-6, *rest), caches[0]))
    assert_same_rounding(results[0][0], results[1][0])
    assert_same_rounding(results[0][1], results[1][1])


@pytest.mark.parametrize("hidden", [1, 7, 200, 1024, 1500])
@pytest.mark.parametrize("rows", [1, 5])
def test_rms_norm_any_size_equals_reference(rows, hidden):
    x, residual, weight = (torch.randn(*shape, dtype=DTYPE) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    assert_same_rounding(norm_triton.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    got, want = (f(x, residual, weight, 1e-6) for f in (norm_triton.add_rms_norm, add_rms_norm_reference))
    assert_same_rounding(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_rms_norm_of_strided_rows_reads_only_its_columns():
    wide = torch.full((4, 96), float("nan"), dtype=DTYPE)
    wide[:, :64] = torch.randn(4, 64)
    weight = torch.randn(64, dtype=DTYPE)
    assert_close(norm_triton.rms_norm(wide[:, :64], weight, 1e-5), rms_norm_reference(wide[:, :64], weight, 1e-5))


@pytest.mark.parametrize("width", [1, 100, 1024, 1500])
@pytest.mark.parametrize(("is_silu", "reference"), [(True, silu_mul_reference), (False, gelu_mul_reference)])
def test_gated_mul_any_width_equals_reference(width, is_silu, reference):
    gate_up = torch.randn(3, 2 * width, dtype=DTYPE) * 4
    assert_close(activation_triton.gated_mul(gate_up, is_silu=is_silu), reference(gate_up))
    wide = gate_up.float()
    assert_close(activation_triton.gated_mul(wide, is_silu=is_silu), reference(wide), tolerance=1e-5)


@pytest.mark.parametrize(("is_silu", "reference"), [(True, silu_mul_reference), (False, gelu_mul_reference)])
def test_gated_mul_of_huge_and_strided_values_equals_reference(is_silu, reference):
    rows = torch.full((2, 12), float("nan"))
    rows[:, :8] = torch.tensor([[3e14, -3e14, 80.0, -80.0], [1.0] * 4]).T.flatten().repeat(2, 1)
    got, want = activation_triton.gated_mul(rows[:, :8], is_silu=is_silu), reference(rows[:, :8])
    assert want.isfinite().all() and torch.allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("layout", ["token first", "head first"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size"), [(9, 3, 64, 16), (10, 2, 128, 1), (8, 8, 80, 64)]
)
def test_rope_append_any_shape_equals_reference(num_heads, num_kv_heads, head_dim, page_size, layout, has_norm):
    num_tokens, num_pages = 7, 128 // page_size
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=DTYPE)
    q_weight, k_weight = (torch.randn(head_dim, dtype=DTYPE) if has_norm else None for _ in range(2))
    angles = torch.rand(50, head_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions, locations = torch.randint(0, 50, (num_tokens,)), torch.randperm(128)[:num_tokens]
    results = []
    for function in (rope_append_triton.qk_norm_rope_append, qk_norm_rope_append_reference):
        caches = [make_cache(num_pages, page_size, num_kv_heads, head_dim, layout).fill_(0.5) for _ in range(2)]
        arguments = (qkv, q_weight, k_weight, 1e-6, cos_sin, positions, *caches, locations)
        results.append((function(*arguments), *caches))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 1e-3)


def make_cache(num_pages, page_size, num_kv_heads, head_dim, layout):
    if layout == "token first":
        return torch.empty(num_pages, page_size, num_kv_heads, head_dim, dtype=DTYPE)
    return torch.empty(num_pages, num_kv_heads, page_size, head_dim, dtype=DTYPE).transpose(1, 2)


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, bits_ptr, gumbel_ptr, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    k0, k1 = noise_triton.row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    bits = noise_triton.token_bits(k0, k1, tl.arange(0, TOKENS))
    tl.store(bits_ptr + row * TOKENS + tl.arange(0, TOKENS), bits.to(tl.int64))
    tl.store(gumbel_ptr + row * TOKENS + tl.arange(0, TOKENS), noise_triton.gumbel(bits))


def test_noise_of_both_twins_agrees_to_rounding():
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    positions = torch.tensor([0, 1, 2**20, 7, 2**31 - 1])
    bits = torch.empty(5, 1024, dtype=torch.int64)
    got = torch.empty(5, 1024)
    _noise_kernel[(5,)](seeds, positions, bits, got, TOKENS=1024)
    k0, k1 = noise.row_keys(*noise.split_seeds(seeds), positions)
    want = noise.gumbel(k0[:, None], k1[:, None], torch.arange(1024, dtype=torch.int32))
    assert len(bits.unique()) > 5 * 1020
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 1000, 1024, 5001])
def test_sample_any_vocabulary_equals_reference(vocab):
    rows = 16
    logits = (torch.randn(rows, vocab) * 3).to(DTYPE)
    temperature = torch.tensor([0.0, 0.6, 1.0, 5.0]).repeat(4)
    seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows)
    got = sampling_triton.sample(logits, temperature, seeds, positions, 0)
    want = sample_reference(logits, temperature, seeds, positions)
    assert torch.equal(got.tokens, want.tokens)
    assert not got.failed.any()
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-5, atol=1e-5)


def test_sample_of_many_rows_skips_no_winner():
    rows = 16
    logits = torch.randn(rows, 20_000, dtype=DTYPE) * torch.linspace(0.1, 8, rows, dtype=DTYPE)[:, None]
    temperature, seeds, positions = torch.full((rows,), 0.8), torch.arange(rows) * 7919, torch.arange(rows)
    got = sampling_triton.sample(logits, temperature, seeds, positions, 0, target_programs=2 * rows)
    assert torch.equal(got.tokens, sample_reference(logits, temperature, seeds, positions).tokens)


def test_sample_of_equal_logits_takes_lowest_id():
    logits = torch.zeros(3, 5000, dtype=DTYPE)
    logits[1, 1500:] = 1
    logits[2, [77, 4000]] = 2
    zeros = torch.zeros(3)
    got = sampling_triton.sample(logits, zeros, zeros.long(), zeros.long(), 0)
    assert got.tokens.tolist() == [0, 1500, 77]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_of_broken_row_sets_failure_and_keeps_valid_id(temperature):
    logits = torch.randn(5, 3000, dtype=DTYPE)
    logits[0, 2999] = float("nan")
    logits[1, 0] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    temperatures = torch.full((5,), temperature)
    got = sampling_triton.sample(logits, temperatures, torch.arange(5), torch.arange(5), 0)
    assert got.failed.tolist() == [True, True, True, False, False]
    assert all(0 <= token < 3000 for token in got.tokens.tolist())
    assert got.tokens[3] == 0


def test_sample_from_vocabulary_parts_equals_whole():
    logits, rows = torch.randn(8, 3000, dtype=DTYPE), torch.arange(8)
    logits[5] = float("-inf")
    logits[6, :1000] = float("-inf")
    logits[7, 1000:2000] = float("nan")
    temperature = torch.full((8,), 0.7)
    whole = sampling_triton.sample(logits, temperature, rows, rows, 0)
    parts = [sampling_triton.sample(logits[:, i : i + 1000], temperature, rows, rows, i) for i in (0, 1000, 2000)]
    combined = combine_draws(torch.stack([p.tokens for p in parts]), torch.stack([p.scores for p in parts]))
    good = ~whole.failed
    assert torch.equal(combined.tokens[good], whole.tokens[good])
    assert combined.failed.tolist() == whole.failed.tolist() == [False] * 5 + [True, False, True]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_outputs", "width"), [(64, 64), (100, 200), (72, 3072), (40, 5120)])
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_linear_of_few_rows_equals_reference(rows, num_outputs, width, has_bias):
    x, weight = torch.randn(rows, width, dtype=DTYPE), torch.randn(num_outputs, width, dtype=DTYPE)
    bias = torch.randn(num_outputs, dtype=DTYPE) * 10 if has_bias else None
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for _ in range(2):  # the second call finds the counters as the first left them
        assert_close(linear_triton.linear(x, weight, bias), want.to(DTYPE))
