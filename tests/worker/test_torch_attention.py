"""The `torch` backend, which judges all others, against the definition of attention, token by token in float64."""

import math

import pytest
import torch
from torch import Tensor

from minisgl_worker.attention import PairedAttention
from minisgl_worker.attention.base import AttentionSetup, ForwardBatch
from minisgl_worker.attention.torch_ref import TorchAttention
from tests.attention_cases import DecodeGraph, Requests, expect_decode, expect_prefill

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def make_setup(group: int = 3, head_dim: int = 16, page_size: int = 4, windows=(None, 5)) -> AttentionSetup:
    return AttentionSetup(2 * group, 2, head_dim, windows, torch.float64, page_size, 8, 128, CPU)


def attend_by_definition(query: Tensor, requests: Requests, request: int, position: int, layer: int) -> Tensor:
    """One token's output [num_heads, head_dim]: each head's softmax over the tokens that it sees."""
    setup = requests.setup
    window = setup.layer_windows[layer] or position + 1
    seen = range(max(0, position + 1 - window), position + 1)
    places = [(int(requests.table[request, t // setup.page_size]), t % setup.page_size) for t in seen]
    out = torch.zeros_like(query)
    for head in range(setup.num_heads):
        kv_head = head * setup.num_kv_heads // setup.num_heads
        keys = torch.stack([requests.kv.k[layer][page, offset, kv_head] for page, offset in places])
        values = torch.stack([requests.kv.v[layer][page, offset, kv_head] for page, offset in places])
        weights = [math.exp(float(key @ query[head]) / math.sqrt(setup.head_dim)) for key in keys]
        out[head] = sum(w / sum(weights) * value for w, value in zip(weights, values, strict=True))
    return out


def owners_and_positions(requests: Requests, batch: ForwardBatch, decode: list[int], prefills: list[tuple[int, int]]):
    """(request, position) of each token of a batch."""
    tokens = [(request, int(requests.lengths[request]) - 1) for request in decode]
    for (request, count), row in zip(prefills, batch.prefills, strict=True):
        tokens += [(request, row.first_position + i) for i in range(count)]
    return tokens


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_mixed_batch_equals_the_definition(group: int, page_size: int) -> None:
    """With NaN in all memory that no token owns, and pages of NaN at the end of the page tables."""
    setup = make_setup(group, page_size=page_size)
    requests = Requests(setup, [1, 4, 13, 9, 17, 1])
    decode, prefills = [0, 2, 1], [(3, 9), (4, 6), (5, 1)]
    batch = requests.batch(decode, prefills)
    backend, tokens = TorchAttention(setup), owners_and_positions(requests, batch, decode, prefills)
    query = torch.randn(len(tokens), setup.num_heads, setup.head_dim, dtype=torch.float64)
    backend.plan(batch)
    for layer in (0, 1):
        want = torch.stack([attend_by_definition(query[i], requests, *token, layer) for i, token in enumerate(tokens)])
        torch.testing.assert_close(backend.attend(query, layer, batch), want, rtol=1e-12, atol=1e-12)
        twins = [expect_decode(query[:3], requests.kv, batch.host, layer, setup)]
        for row in batch.prefills:
            part = slice(row.first_row, row.first_row + row.num_tokens)
            twins.append(expect_prefill(query[part], requests.kv, row, layer, setup))
        torch.testing.assert_close(torch.cat(twins), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [1, 4, 5, 100])
def test_window_counts_the_token_itself(window: int) -> None:
    setup = make_setup(windows=(window,))
    requests = Requests(setup, [12, 12])
    batch = requests.batch([0], [(1, 12)])
    query = torch.randn(13, setup.num_heads, setup.head_dim, dtype=torch.float64)
    got = TorchAttention(setup).attend(query, 0, batch)
    tokens = [(0, 11), *((1, position) for position in range(12))]
    want = torch.stack([attend_by_definition(query[i], requests, *token, 0) for i, token in enumerate(tokens)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_rows_of_the_dummy_slot_leave_the_others_alone() -> None:
    setup = make_setup()
    requests = Requests(setup, [3, 10, 6])
    graph = DecodeGraph(TorchAttention(setup), requests, 4)
    query = torch.randn(4, setup.num_heads, setup.head_dim, dtype=torch.float64)
    outs = graph.replay(requests.host_rows([1, 2, -1, -1]), query)
    for layer, out in enumerate(outs):
        assert out.isfinite().all()
        for row, (request, position) in enumerate([(1, 9), (2, 5)]):
            want = attend_by_definition(query[row], requests, request, position, layer)
            torch.testing.assert_close(out[row], want, rtol=1e-12, atol=1e-12)


class Marker(TorchAttention):
    """Adds a number to all that it computes, and remembers the batches that it planned."""

    def __init__(self, setup: AttentionSetup, mark: float):
        super().__init__(setup)
        self._mark = mark
        self.planned: list[tuple[int, int]] = []

    def plan(self, batch: ForwardBatch) -> None:
        self.planned.append((batch.num_decode, len(batch.prefills)))

    def attend(self, query: Tensor, layer: int, batch: ForwardBatch) -> Tensor:
        return super().attend(query, layer, batch) + self._mark


def test_pair_gives_each_kind_of_rows_to_its_backend() -> None:
    setup = make_setup()
    requests = Requests(setup, [3, 10, 6])
    for decode, prefills in (([0, 1], [(2, 4)]), ([2], []), ([], [(1, 10), (0, 2)])):
        prompts, rows = Marker(setup, 100.0), Marker(setup, 1000.0)
        pair, batch = PairedAttention(prompts, rows), requests.batch(decode, prefills)
        num_tokens = len(decode) + sum(count for _, count in prefills)
        query = torch.randn(num_tokens, setup.num_heads, setup.head_dim, dtype=torch.float64)
        pair.plan(batch)
        got = pair.attend(query, 1, batch)
        want = TorchAttention(setup).attend(query, 1, batch)
        want[: len(decode)] += 1000
        want[len(decode) :] += 100
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert rows.planned == ([(len(decode), 0)] if decode else [])
        assert prompts.planned == ([(0, len(prefills))] if prefills else [])
