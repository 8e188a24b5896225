"""The native CPU kernels against their plain torch twins, and what happens without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minisgl_worker.attention.base import ForwardBatch
from minisgl_worker.attention.torch_ref import attend_decode_reference
from minisgl_worker.kernels.activation import silu_mul_reference
from minisgl_worker.kernels.native import NativeKernels, kernels_for
from minisgl_worker.kernels.norm import add_rms_norm_reference, rms_norm_reference
from minisgl_worker.kernels.rope_append import qk_norm_rope_append_reference
from minisgl_worker.kv_cache import KVCache

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def native(dtype: torch.dtype) -> NativeKernels:
    kernels = kernels_for(torch.empty(1, 16, dtype=dtype))
    if kernels is None:
        pytest.skip("no C++ compiler on this machine")
    return kernels


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16: within a unit in the last place of the twin, which rounds in other places; fp32: within 1e-5."""
    tolerance = 1 / 128 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 50, 64])
@pytest.mark.parametrize(("out_size", "in_size"), [(960, 576), (48, 64), (30, 96), (1, 32), (33, 1536)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_with_the_transposed_weight(rows, out_size, in_size, has_bias) -> None:
    x, weight = draw(rows, in_size, dtype=torch.bfloat16), draw(out_size, in_size, dtype=torch.bfloat16, seed=1)
    bias = draw(out_size, dtype=torch.bfloat16, seed=2) if has_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    actual = native(torch.bfloat16).linear(x, weight, bias)
    torch.testing.assert_close(actual.double(), expected, rtol=1 / 256, atol=1e-4 * in_size**0.5)


@pytest.mark.parametrize("size", [16, 64, 576, 4096])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_norms_equal_their_twins(dtype, rows, size) -> None:
    x, residual = draw(rows, size, dtype=dtype, scale=3), draw(rows, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=dtype, seed=2)
    assert_near(native(dtype).rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    before = x.clone(), residual.clone()
    normed, total = native(dtype).add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_near(normed, expected_normed)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_silu_mul_equals_its_twin_to_the_ends_of_the_range(dtype, rows) -> None:
    gate_up = draw(rows, 2 * 1536, dtype=dtype, scale=4)
    gate_up[0, :8] = torch.tensor([0.0, -0.0, 200.0, -200.0, 3e38, torch.inf, 1e-30, -90.0], dtype=dtype)
    assert_near(native(dtype).silu_mul(gate_up), silu_mul_reference(gate_up))


def test_not_a_number_stays_one_and_stays_in_its_row(dtype) -> None:
    kernels = native(dtype)
    x = draw(3, 64, dtype=dtype)
    x[1, 5] = torch.nan
    weight = draw(64, dtype=dtype, seed=1)
    for out in (kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(x), kernels.add_rms_norm(x, x, weight, 1e-5)[0]):
        assert [bool(row.isnan().any()) for row in out] == [False, True, False]
    if dtype == torch.bfloat16:
        out = kernels.linear(x, draw(64, 64, dtype=dtype, seed=2), None)
        assert [bool(row.isnan().any()) for row in out] == [False, True, False]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (5, 1, 128), (16, 8, 256)])
def test_rope_append_equals_its_twin(dtype, num_heads, num_kv_heads, head_dim, has_norm) -> None:
    num_tokens, page_size, num_pages = 7, 4, 6
    qkv = draw(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weights = [draw(head_dim, dtype=dtype, seed=seed) if has_norm else None for seed in (1, 2)]
    table = draw(100, head_dim, dtype=torch.float32, seed=3).clamp(-1, 1)
    positions = torch.tensor([0, 99, 5, 6, 7, 50, 3])
    locations = torch.tensor([3, 0, 23, 8, 9, 10, 17])
    outcomes = []
    for function in (native(dtype).qk_norm_rope_append, qk_norm_rope_append_reference):
        k, v = (torch.zeros(num_pages, page_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
        outcomes.append((function(qkv, *weights, 1e-6, table, positions, k, v, locations), k, v))
    for actual, expected in zip(*outcomes, strict=True):
        assert_near(actual, expected)
    assert torch.equal(outcomes[0][2], outcomes[1][2])


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 16), (10, 2, 128)])
def test_decode_attention_equals_its_twin_beside_unwritten_memory(
    dtype, num_heads, num_kv_heads, head_dim, page_size, window
) -> None:
    lengths = [1, 2, 15, 16, 17, 64, 111, 300]
    num_pages = sum(-(-length // page_size) for length in lengths)
    kv = KVCache(1, num_pages, page_size, num_kv_heads, head_dim, dtype, CPU)
    page_ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(len(lengths), -(-max(lengths) // page_size), dtype=torch.int32)
    kv.k[0].fill_(torch.nan)
    kv.v[0].fill_(torch.nan)
    used = 0
    for row, length in enumerate(lengths):
        count = -(-length // page_size)
        table[row, :count] = page_ids[used : used + count]
        used += count
        positions = torch.arange(length)
        pages, offsets = table[row, positions // page_size].long(), positions % page_size
        kv.k[0][pages, offsets] = draw(length, num_kv_heads, head_dim, dtype=dtype, seed=row)
        kv.v[0][pages, offsets] = draw(length, num_kv_heads, head_dim, dtype=dtype, seed=100 + row)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(2))
    for slots in (None, order.int()):
        batch = ForwardBatch(
            kv=kv, positions=torch.zeros(0), kv_locations=torch.zeros(0), num_decode=len(lengths),
            decode_page_table=table, decode_seq_lens=torch.tensor(lengths, dtype=torch.int32),
            decode_slots=slots, prefills=(), sampling_rows=None,
        )  # fmt: skip
        query = draw(len(lengths), num_heads, head_dim, dtype=dtype, seed=5, scale=2)
        k, v = kv.layer(0)
        lens = batch.decode_seq_lens
        actual = native(dtype).attend_decode(query, k, v, table, lens, slots, 0.125, window)
        expected = attend_decode_reference(query.double(), k.double(), v.double(), batch, 0.125, window)
        tolerance = 1 / 128 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_sizes_that_vectors_do_not_divide_are_served_by_torch() -> None:
    assert kernels_for(torch.empty(2, 24, dtype=torch.bfloat16)) is None
    assert kernels_for(torch.empty(2, 32, dtype=torch.bfloat16)[:, ::2]) is None
    assert kernels_for(torch.empty(2, 32, dtype=torch.float64)) is None
    assert kernels_for(torch.empty(2, 32, dtype=torch.float16)) is None


PROBE = """
import logging, torch
logging.basicConfig()
from minisgl_worker.kernels.native import kernels_for
from minisgl_worker.kernels.norm import rms_norm
x = torch.ones(2, 32)
print(kernels_for(x) is not None, rms_norm(x, x[0], 0.0).eq(1).all().item())
"""


def probe(cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=cwd, env=environment)


def test_without_a_compiler_torch_serves_and_one_line_says_so(tmp_path) -> None:
    run = probe(PATH=str(tmp_path), CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert run.stdout.split() == ["False", "True"]
    assert run.stderr.count("no C++ compiler") == 1
    run = probe(MINISGL_NATIVE="0")
    assert (run.stdout.split(), run.stderr) == (["False", "True"], "")


def test_compiler_that_fails_is_told_and_leaves_nothing(tmp_path) -> None:
    compiler = tmp_path / "bad-compiler"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo as arranged >&2; exit 1; }\n")
    compiler.chmod(0o755)
    run = probe(CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert run.stdout.split() == ["False", "True"] and "as arranged" in run.stderr
    assert list((tmp_path / "cache" / "minisgl").iterdir()) == []


def test_library_is_built_once(tmp_path) -> None:
    native(torch.float32)
    assert probe(XDG_CACHE_HOME=str(tmp_path)).stdout.split() == ["True", "True"]
    (library,) = (tmp_path / "minisgl").iterdir()
    built = library.stat().st_mtime_ns
    assert probe(XDG_CACHE_HOME=str(tmp_path)).stdout.split() == ["True", "True"]
    assert library.stat().st_mtime_ns == built


def test_cache_folder_that_is_not_absolute_is_ignored(tmp_path) -> None:
    native(torch.float32)
    (tmp_path / "here").mkdir()
    run = probe(XDG_CACHE_HOME="relative", HOME=str(tmp_path), cwd=tmp_path / "here")
    assert run.stdout.split() == ["True", "True"]
    assert list((tmp_path / "here").iterdir()) == []
    assert len(list((tmp_path / ".cache" / "minisgl").iterdir())) == 1


def test_library_in_a_folder_that_others_may_write_is_not_run(tmp_path) -> None:
    native(torch.float32)
    (tmp_path / "minisgl").mkdir()
    (tmp_path / "minisgl").chmod(0o777)
    run = probe(XDG_CACHE_HOME=str(tmp_path))
    assert run.stdout.split() == ["False", "True"] and "can be written by others" in run.stderr
