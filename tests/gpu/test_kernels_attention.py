"""Attention kernels against their plain twins: compiled on a GPU, or on the CPU where TRITON_INTERPRET=1 is set."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from minisgl_worker.attention.base import AttentionSetup, ForwardBatch, PrefillRow
from minisgl_worker.attention.triton import TritonAttention
from minisgl_worker.kernels.decode_attention import decode_attention_reference
from minisgl_worker.kernels.decode_attention_triton import DecodePlan, decode_attention
from minisgl_worker.kernels.prefill_attention import prefill_attention_reference
from minisgl_worker.kernels.prefill_attention_triton import plan_prefill, prefill_attention
from minisgl_worker.kernels.rope_append_triton import qk_norm_rope_append
from minisgl_worker.kv_cache import KVCache

pytestmark = pytest.mark.gpu
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter's bf16 is approximate, its fp16 exact.
DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
SHAPES = [(2, 2, 64), (4, 2, 128), (9, 3, 64), (8, 2, 80), (10, 2, 128), (12, 2, 64), (7, 1, 64), (8, 1, 128)]


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
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


class Cache:
    """K and V of rows of given lengths in shuffled pages; all memory that no token owns holds NaN."""

    def __init__(self, lengths, num_kv_heads, head_dim, page_size, layout="token first"):
        width = max(1, -(-max(lengths) // page_size))
        num_pages = len(lengths) * width + 1
        self.table = torch.randperm(num_pages)[: len(lengths) * width].view(-1, width).to(torch.int32)
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        if layout == "head first":
            shape = (num_pages, num_kv_heads, page_size, head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=DTYPE) for _ in range(2))
        if layout == "head first":
            self.k, self.v = self.k.transpose(1, 2), self.v.transpose(1, 2)
        for row, length in enumerate(lengths):
            tokens = torch.arange(length)
            pages = self.table[row, tokens // page_size].long()
            for store in (self.k, self.v):
                store[pages, tokens % page_size] = torch.randn(length, num_kv_heads, head_dim, dtype=DTYPE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


def check_decode(cache, num_heads, plan, slots=None, rounds=1):
    head_dim, num_kv_heads = cache.k.shape[3], cache.k.shape[2]
    num_rows = len(cache.lengths) if slots is None else len(slots)
    query = torch.randn(num_rows, num_heads, head_dim, dtype=DTYPE)
    arguments = (query, cache.k, cache.v, cache.table, cache.lengths, head_dim**-0.5)
    want = decode_attention_reference(*arguments, slots=slots, window=plan.window)
    for _ in range(rounds):  # a later round finds the counters as the one before left them
        out = torch.full_like(query, float("nan"))
        plan.build(cache.lengths, num_rows, slots)
        decode_attention(*arguments, plan, out, slots=slots)
        assert_close(out, want)
    assert num_heads % num_kv_heads == 0 and not plan.counters.any()


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_decode_any_shape_equals_reference(device, num_heads, num_kv_heads, head_dim):
    cache = Cache([1, 15, 33, 0, 64, 301], num_kv_heads, head_dim, 16)
    check_decode(cache, num_heads, DecodePlan(16, num_heads, num_kv_heads, head_dim, device))


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_decode_any_page_size_equals_reference(device, page_size):
    check_decode(Cache([150, 1, 64, 0, 65], 2, 64, page_size), 4, DecodePlan(16, 4, 2, 64, device))


def test_decode_of_head_first_cache_equals_reference(device):
    cache = Cache([40, 5, 200], 2, 64, 16, "head first")
    check_decode(cache, 4, DecodePlan(16, 4, 2, 64, device))


def test_decode_of_one_plan_serves_any_lengths(device):
    plan = DecodePlan(64, 2, 1, 64, device)
    for lengths in ([4000], [1] * 20, [900, 1, 1, 1, 300], [32, 32, 32], [31, 63, 95, 127]):
        check_decode(Cache(lengths, 1, 64, 16), 2, plan, rounds=2)


@pytest.mark.parametrize("window", [1, 20, 32, 100])
def test_decode_with_window_equals_reference(device, window):
    cache = Cache([1, 20, 21, 50, 333, 128], 2, 64, 16)
    check_decode(cache, 4, DecodePlan(16, 4, 2, 64, device, window))


def test_decode_through_slots_equals_reference(device):
    cache = Cache([30, 70, 1, 256, 9], 2, 64, 16)
    check_decode(cache, 4, DecodePlan(16, 4, 2, 64, device), slots=torch.tensor([3, 0, 2, 3]))


def test_decode_right_after_append_sees_the_new_token(device):
    num_rows, scale = 3, 64**-0.5
    cache = Cache([65, 200, 33], 2, 64, 16)
    plan = DecodePlan(16, 4, 2, 64, device)
    angles = torch.rand(256, 32) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = cache.lengths.long() - 1
    pages = cache.table[torch.arange(num_rows), positions // 16].long()
    locations = pages * 16 + positions % 16
    plan.build(cache.lengths, num_rows)
    for _ in range(1 if IS_INTERPRETED else 50):  # the second kernel starts while the first runs
        qkv = torch.randn(num_rows, 8 * 64, dtype=DTYPE) * 4
        out = torch.full((num_rows, 4, 64), float("nan"), dtype=DTYPE)
        query = qk_norm_rope_append(qkv, None, None, 1e-6, cos_sin, positions, cache.k, cache.v, locations)
        arguments = (query, cache.k, cache.v, cache.table, cache.lengths, scale)
        decode_attention(*arguments, plan, out, plan_is_old=True)
        assert_close(out, decode_attention_reference(*arguments))
        assert torch.equal(cache.v[pages, positions % 16], qkv.view(num_rows, 8, 64)[:, 6:])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (5, 1, 128), (2, 1, 80)])
def test_prefill_any_shape_equals_reference(num_heads, num_kv_heads, head_dim, page_size, window):
    rows = [(0, 1, 0), (1, 65, 0), (66, 130, 37), (200, 3, 90)]  # 196..199 belong to nobody
    cache = Cache([first + count for _, count, first in rows], num_kv_heads, head_dim, page_size)
    query = torch.randn(203, num_heads, head_dim, dtype=DTYPE)
    out = torch.full_like(query, 7.0)
    tiles = plan_prefill(rows).to(query.device)
    prefill_attention(query, cache.k, cache.v, cache.table, tiles, head_dim**-0.5, out, window)
    for row, (start, count, first) in enumerate(rows):
        part = slice(start, start + count)
        arguments = (query[part], cache.k, cache.v, cache.table[row], first, head_dim**-0.5)
        assert_close(out[part], prefill_attention_reference(*arguments, window=window))
    assert (out[196:200] == 7.0).all()


@pytest.mark.parametrize("has_slots", [True, False])
def test_backend_of_mixed_batch_with_windows_equals_reference(device, has_slots):
    kv = KVCache(2, 40, 16, 2, 64, DTYPE, device)
    for store in (*kv.k, *kv.v):
        store.normal_()
    pages = torch.randperm(40)
    table, lengths = pages[:12].view(2, 6).to(torch.int32), torch.tensor([90, 17], dtype=torch.int32)
    slots = torch.tensor([1, 0], dtype=torch.int32) if has_slots else None
    host_pages = pages.cpu().numpy()
    prefills = (PrefillRow(2, 70, 0, host_pages[12:17]), PrefillRow(72, 5, 30, host_pages[17:20]))
    none = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(kv, none, none, 2, table, lengths, slots, prefills, none)
    backend = TritonAttention(AttentionSetup(4, 2, 64, (None, 24), DTYPE, 16, 8, 640, device))
    query = torch.randn(77, 4, 64, dtype=DTYPE)
    backend.plan(batch)
    for layer, window in ((0, None), (1, 24)):
        caches, got = kv.layer(layer), backend.attend(query, layer, batch)
        want = decode_attention_reference(query[:2], *caches, table, lengths, 0.125, slots=slots, window=window)
        assert_close(got[:2], want)
        for row in prefills:
            part = slice(row.first_row, row.first_row + row.num_tokens)
            row_pages = torch.from_numpy(row.page_ids).to(query.device)
            arguments = (query[part], *caches, row_pages, row.first_position, 0.125)
            assert_close(got[part], prefill_attention_reference(*arguments, window=window))
