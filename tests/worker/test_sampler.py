"""The sampler: filters against a slow reference, distributions, seeds, and rows that fail."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.protocol import Sampling
from minisgl_worker.batch import SlotState
from minisgl_worker.filters import Filters, filter_batch, filter_on_cpu
from minisgl_worker.kernels.sampling import Draw, sample_on_cpu, sample_reference
from minisgl_worker.sampler import Sampler
from tests.worker.checkpoints import GREEDY, make_admit, make_step

VOCAB = 50
CPU = torch.device("cpu")
DRAWN = dataclasses.replace(GREEDY, temperature=0.8)


def make_sampler(samplings: list[Sampling], *, seeds: list[int] | None = None, token_ids: list[int] | None = None,
                 num_prompt: int | None = None) -> Sampler:  # fmt: skip
    slots = SlotState(len(samplings), 8, CPU)
    seeds = seeds or list(range(len(samplings)))
    token_ids = token_ids or [1, 2, 3]
    admits = tuple(
        make_admit(i, token_ids, [0], sampling=s, seed=seed, num_prompt=num_prompt)
        for i, (s, seed) in enumerate(zip(samplings, seeds, strict=True))
    )
    slots.apply(make_step(0, admits=admits))
    sampler = Sampler(slots, VOCAB, CPU)
    for i in range(len(samplings)):
        sampler.admit(i)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, position: int = 3) -> torch.Tensor:
    rows = np.arange(len(logits))
    positions = np.full(len(logits), position)
    chosen = sampler.draw(logits, rows, positions)
    if sampler.has_extras(rows):
        sampler.apply_extras(logits, chosen.tokens, chosen.failed, rows, positions)
    return chosen.tokens


def make_filters(samplings: list[Sampling]) -> Filters:
    return Filters(
        np.array([s.temperature for s in samplings], np.float32), np.array([s.top_k for s in samplings]),
        np.array([s.top_p for s in samplings]), np.array([s.min_p for s in samplings]),
    )  # fmt: skip


def allowed_by_reference(logits: list[float], s: Sampling) -> set[int]:
    """Token by token, as the documentation of each filter reads; the lower id comes first where logits are equal."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = set(order[: s.top_k] if s.top_k else order)

    def probabilities() -> dict[int, float]:
        top = max(logits[t] for t in kept)
        weights = {t: math.exp((logits[t] - top) / s.temperature) for t in kept}
        return {t: w / sum(weights.values()) for t, w in weights.items()}

    if s.top_p < 1.0:
        p, nucleus = probabilities(), set()
        for token in order:
            if token in kept and (not nucleus or sum(p[t] for t in nucleus) < s.top_p):
                nucleus.add(token)
        kept = nucleus
    if s.min_p > 0:
        p = probabilities()
        kept = {t for t in kept if p[t] >= s.min_p * max(p.values())}
    return kept


LIMITS = st.tuples(
    st.integers(0, 60), st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]), st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.3, 1.0, 2.5]),
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 1000), limits=st.lists(LIMITS, min_size=1, max_size=5))
@pytest.mark.parametrize("filter_logits", [filter_on_cpu, filter_batch])
def test_filters_keep_what_the_plain_reference_keeps(filter_logits, seed, limits) -> None:
    """Rows of all kinds in one batch, among them those with equal logits."""
    logits = torch.randn(len(limits), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    logits[::2] = (logits[::2] * 2).round() / 2 + 0.0
    samplings = [
        dataclasses.replace(GREEDY, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k, top_p, min_p, temperature in limits
    ]
    filtered = filter_logits(logits.clone(), make_filters(samplings))
    for row, sampling in enumerate(samplings):
        kept = filtered[row] > -math.inf
        assert set(torch.nonzero(kept)[:, 0].tolist()) == allowed_by_reference(logits[row].tolist(), sampling)
        assert torch.equal(filtered[row][kept], logits[row][kept])


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0.0}])
def test_filter_down_to_one_token_is_greedy_among_equal_logits(limit: dict[str, float]) -> None:
    """Equal logits are common in bf16."""
    logits = torch.full((40, VOCAB), -1.0, dtype=torch.bfloat16)
    logits[:, [7, 8, 30]] = 2.0
    assert set(draw(make_sampler([dataclasses.replace(DRAWN, **limit)] * 40), logits).tolist()) == {7}


@pytest.mark.parametrize("filter_logits", [filter_on_cpu, filter_batch])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_nucleus_of_a_large_flat_vocabulary_is_not_cut_short(filter_logits, top_p: float) -> None:
    """On a CPU only the tokens that may be in the nucleus are sorted."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * torch.tensor(
        [[0.0], [0.1], [3.0]], dtype=torch.float64
    )
    filtered = filter_logits(
        logits.clone(), make_filters([dataclasses.replace(DRAWN, top_p=top_p, temperature=1.0)] * 3)
    )
    for row in range(3):
        p = logits[row].softmax(0)
        mass = p[filtered[row] > -math.inf]
        assert mass.sum() >= top_p - 1e-9 and mass.sum() - mass.min() < top_p + 1e-9


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    is_large = expected >= 5
    rest_seen, rest = counts[~is_large].sum(), expected[~is_large].sum()
    value = ((counts[is_large] - expected[is_large]) ** 2 / expected[is_large]).sum()
    if rest > 0:
        value += (rest_seen - rest) ** 2 / rest
    return float(value) / max(1, int(is_large.sum()))


def test_draws_follow_the_softmax_at_their_temperature_and_no_other() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    num_draws = 6000
    sampler = make_sampler([DRAWN] * num_draws)
    counts = torch.bincount(draw(sampler, logits.repeat(num_draws, 1)), minlength=VOCAB).double()
    assert chi_square(counts, torch.softmax(logits.double() / 0.8, -1)) < 1.8
    assert chi_square(counts, torch.softmax(logits.double() / 0.95, -1)) > 3  # the control


@pytest.mark.parametrize("sampling", [
    dataclasses.replace(DRAWN, top_k=VOCAB), dataclasses.replace(DRAWN, top_k=VOCAB - 1, min_p=1e-12),
    dataclasses.replace(DRAWN, num_logprobs=0),
    dataclasses.replace(DRAWN, bias_ids=b"\x05\0\0\0", bias_values=bytes(4)),
    dataclasses.replace(DRAWN, min_tokens=0, stop_ids=b"\x01\0\0\0"),
])  # fmt: skip
def test_inert_extras_change_no_token(sampling: Sampling) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(make_sampler([sampling] * 64), logits), draw(make_sampler([DRAWN] * 64), logits))


KINDS = [
    GREEDY, DRAWN, dataclasses.replace(DRAWN, top_k=3), dataclasses.replace(DRAWN, top_p=0.6, num_logprobs=2),
    dataclasses.replace(DRAWN, top_k=9, top_p=0.8, temperature=1.7), dataclasses.replace(DRAWN, min_p=0.3),
    dataclasses.replace(GREEDY, frequency_penalty=0.5, num_logprobs=0), dataclasses.replace(GREEDY, top_p=0.1),
    dataclasses.replace(DRAWN, repetition_penalty=1.4, presence_penalty=-0.3),
    dataclasses.replace(DRAWN, bias_ids=b"\x05\0\0\0\x09\0\0\0", bias_values=np.array([3, -2], "<f4").tobytes()),
    dataclasses.replace(GREEDY, min_tokens=3, stop_ids=np.array([1, 2, 3, 40], "<i4").tobytes()),
]  # fmt: skip


def test_rows_with_extras_are_the_same_alone_and_in_any_batch() -> None:
    """More of them than are handled at once; over several steps, as penalties have a memory."""
    samplings = [KINDS[i % len(KINDS)] for i in range(100)]
    generator = torch.Generator().manual_seed(6)
    steps = [torch.randn(100, VOCAB, generator=generator).to(torch.bfloat16) for _ in range(4)]

    def run(rows: list[int]) -> list[list[int]]:
        sampler = make_sampler([samplings[row] for row in rows], seeds=rows)
        columns = [draw(sampler, logits[rows], 3 + i).tolist() for i, logits in enumerate(steps)]
        return [list(tokens) for tokens in zip(*columns, strict=True)]

    together = run(list(range(100)))
    assert [run([row])[0] for row in range(100)] == together
    shuffled = [*range(50, 100), *range(49, -1, -1)]
    assert run(shuffled) == [together[row] for row in shuffled]


class ValuelessSampler(Sampler):
    """Draws on the `meta` device, where tensors have no values: an operation that needs one on the host raises."""

    def _draw(
        self, rule: object, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, is_quiet: np.ndarray
    ) -> Draw:
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        return Draw(tokens, tokens.float(), tokens.bool())


def test_extras_never_make_the_host_wait_for_the_device() -> None:
    """The thread that launches would stand still. On a CPU there is nothing to wait for."""
    meta = torch.device("meta")
    slots = SlotState(len(KINDS), 8, meta)
    slots.apply(make_step(0, admits=tuple(make_admit(i, [1, 2], [0], sampling=s) for i, s in enumerate(KINDS))))
    sampler = ValuelessSampler(slots, VOCAB, meta)
    rows = np.arange(len(KINDS))
    for row in rows.tolist():
        sampler.admit(row)
    logits = torch.empty(len(KINDS), VOCAB, device=meta)
    chosen = sampler.draw(logits, rows, rows)
    assert len(sampler.apply_extras(logits, chosen.tokens, chosen.failed, rows, rows + 2).token_ids) == 3 + 1
    with pytest.raises(RuntimeError, match="meta"):
        logits.sum().item()  # the control


def test_rows_with_extras_may_come_in_any_order_of_their_slots() -> None:
    logits = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(11))
    expected = draw(make_sampler(KINDS), logits)
    slots = np.random.default_rng(0).permutation(len(KINDS))
    sampler = make_sampler(KINDS)
    moved = logits[torch.from_numpy(slots)]
    chosen = sampler.draw(moved, slots, np.full(len(slots), 3))
    sampler.apply_extras(moved, chosen.tokens, chosen.failed, slots, np.full(len(slots), 3))
    assert torch.equal(chosen.tokens, expected[torch.from_numpy(slots)])


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", [GREEDY, dataclasses.replace(GREEDY, repetition_penalty=5.0),
                                 dataclasses.replace(GREEDY, frequency_penalty=9.0)])  # fmt: skip
def test_new_request_in_a_slot_has_none_of_the_extras_before_it(old: Sampling, new: Sampling) -> None:
    """The former request held and drew the most likely token, over and over; the new one never did."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7))
    best = logits.argmax().item()
    sampler = make_sampler([old], token_ids=[best, best, best], num_prompt=1)
    draw(sampler, logits)
    others = [token for token in range(VOCAB) if token != best][:3]
    sampler._slots.apply(make_step(1, admits=(make_admit(0, others, [0], sampling=new),)))
    sampler.admit(0)
    assert draw(sampler, logits).item() == best
    assert sampler.has_extras(np.zeros(1, np.int64)) == (new != GREEDY)


def test_seeded_draw_is_the_same_alone_and_in_any_row() -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    together = draw(make_sampler([DRAWN] * 8, seeds=[2**64 - 1 - i for i in range(8)]), logits)
    for row in range(8):
        alone = draw(make_sampler([DRAWN], seeds=[2**64 - 1 - row]), logits[row : row + 1])
        assert alone[0] == together[row]
    moved = draw(make_sampler([DRAWN] * 8, seeds=[2**64 - 1 - i for i in range(8)]), logits, position=4)
    assert not torch.equal(moved, together)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    expected = draw(make_sampler([DRAWN, GREEDY] * 2), logits)
    broken = logits.clone()
    if bad == -math.inf:
        broken[2] = bad
    else:
        broken[2, 7] = bad
    sampler = make_sampler([DRAWN, GREEDY] * 2)
    chosen = sampler.draw(broken, np.arange(4), np.full(4, 3))
    assert chosen.failed.tolist() == [False, False, True, False]
    assert 0 <= int(chosen.tokens[2]) < VOCAB
    assert all(chosen.tokens[i] == expected[i] for i in (0, 1, 3))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_row_with_nothing_left_to_choose_from_fails_alone(sampling: Sampling) -> None:
    """Its logits are finite, but every token that has one is masked."""
    logits = torch.full((2, VOCAB), -math.inf)
    logits[:, [4, 5]] = 1.0
    masked = dataclasses.replace(sampling, min_tokens=9, stop_ids=np.array([4, 5], "<i4").tobytes())
    sampler = make_sampler([masked, sampling])
    chosen = sampler.draw(logits, np.arange(2), np.full(2, 3))
    assert chosen.failed.tolist() == [False, False]
    sampler.apply_extras(logits, chosen.tokens, chosen.failed, np.arange(2), np.full(2, 3))
    assert chosen.failed.tolist() == [True, False]
    assert 0 <= int(chosen.tokens[0]) < VOCAB and int(chosen.tokens[1]) in (4, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", KINDS[2:])
def test_row_that_is_not_finite_fails_with_any_extras(sampling: Sampling, bad: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[0, :] = bad if bad == -math.inf else logits[0]
    logits[0, 7] = bad
    sampler = make_sampler([sampling] * 2)
    chosen = sampler.draw(logits, np.arange(2), np.full(2, 3))
    sampler.apply_extras(logits, chosen.tokens, chosen.failed, np.arange(2), np.full(2, 3))
    assert chosen.failed.tolist() == [True, False] and 0 <= int(chosen.tokens[0]) < VOCAB


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 30, 31]] = 2.0
    assert draw(make_sampler([GREEDY]), logits).item() == 9


def test_penalties_count_output_but_not_prompt_also_after_preemption() -> None:
    """A request that comes back holds its output among token_ids; num_prompt_tokens tells where it begins."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([1.0, 0.9, 0.8])
    presence = dataclasses.replace(GREEDY, presence_penalty=0.5)
    assert draw(make_sampler([presence], token_ids=[5, 5], num_prompt=2), logits.clone()).item() == 5
    assert draw(make_sampler([presence], token_ids=[9, 5], num_prompt=1), logits.clone()).item() == 6
    repetition = dataclasses.replace(GREEDY, repetition_penalty=1.5)
    assert draw(make_sampler([repetition], token_ids=[5, 6], num_prompt=2), logits.clone()).item() == 7
    frequency = make_sampler([dataclasses.replace(GREEDY, frequency_penalty=0.06)], token_ids=[9], num_prompt=1)
    assert [draw(frequency, logits.clone(), position).item() for position in range(1, 5)] == [5, 5, 6, 5]


def test_stop_ids_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0
    sampling = dataclasses.replace(GREEDY, min_tokens=2, stop_ids=np.array([2], "<i4").tobytes())
    sampler = make_sampler([sampling], token_ids=[1, 1, 1])
    assert [draw(sampler, logits, position).item() for position in (3, 4, 5)] == [0, 0, 2]


def test_log_probabilities_are_of_the_raw_logits_best_first() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    sampling = dataclasses.replace(GREEDY, num_logprobs=3, bias_ids=b"\x04\0\0\0", bias_values=np.float32(99).tobytes())
    sampler = make_sampler([sampling])
    chosen = sampler.draw(logits, np.arange(1), np.full(1, 3))
    tokens = chosen.tokens
    result = sampler.apply_extras(logits, tokens, chosen.failed, np.arange(1), np.full(1, 3))
    expected = logits[0].log_softmax(-1)
    assert tokens.tolist() == [4] == result.token_ids[:1].tolist()
    assert result.token_ids[1:].tolist() == expected.topk(3).indices.tolist()
    assert torch.allclose(result.values, expected[result.token_ids.long()], atol=1e-6)


def test_log_probabilities_of_several_rows_follow_each_other() -> None:
    """k + 1 items for each row that asked for k, in the order of the rows; none for the others."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(8))
    wanted = [2, None, 0, 20, None]
    sampler = make_sampler([dataclasses.replace(DRAWN, num_logprobs=k) for k in wanted])
    chosen = sampler.draw(logits, np.arange(5), np.full(5, 3))
    result = sampler.apply_extras(logits, chosen.tokens, chosen.failed, np.arange(5), np.full(5, 3))
    expected = []
    for row, k in enumerate(wanted):
        if k is not None:
            expected += [int(chosen.tokens[row]), *logits[row].topk(k).indices.tolist()]
    assert result.token_ids.tolist() == expected and len(expected) == 3 + 1 + 21
    rows = torch.tensor([0] * 3 + [2] + [3] * 21)
    assert torch.allclose(result.values, logits.log_softmax(1)[rows, result.token_ids.long()], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first_token_id", [0, 70_000])
def test_fast_draw_on_a_cpu_equals_the_plain_one(dtype: torch.dtype, first_token_id: int) -> None:
    generator = torch.Generator().manual_seed(10)
    logits = (torch.randn(24, 1031, generator=generator) * 4).to(dtype)
    logits[3, 5], logits[4, 6], logits[5], logits[6, 100:] = math.nan, math.inf, -math.inf, -math.inf
    temperature = torch.tensor([0.0, 1e-5, 0.3, 1.0, 2.0, 50.0]).repeat(4)
    seeds = torch.randint(-(2**63), 2**63 - 1, (24,), generator=generator)
    arguments = (logits, temperature, seeds, torch.arange(24) * 1000, first_token_id)
    fast, plain = sample_on_cpu(*arguments), sample_reference(*arguments)
    assert torch.equal(fast.tokens, plain.tokens) and torch.equal(fast.failed, plain.failed)
    assert torch.equal(fast.scores.nan_to_num(), plain.scores.nan_to_num())
