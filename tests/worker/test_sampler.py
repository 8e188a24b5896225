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
from minisgl_worker.sampler import Sampler, filter_logits
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
        sampler.apply_extras(logits, chosen.tokens, rows, positions)
    return chosen.tokens


def allowed_by_reference(logits: list[float], s: Sampling) -> set[int]:
    """Token by token, as the documentation of each filter reads."""
    kept = set(range(len(logits)))
    if 0 < s.top_k < len(logits):
        border = sorted(logits, reverse=True)[s.top_k - 1]
        kept = {t for t in kept if logits[t] >= border}

    def probabilities() -> dict[int, float]:
        top = max(logits[t] for t in kept)
        weights = {t: math.exp((logits[t] - top) / s.temperature) for t in kept}
        return {t: w / sum(weights.values()) for t, w in weights.items()}

    if s.top_p < 1.0:
        p = probabilities()
        total, border = 0.0, 0.0
        for value in sorted(p.values(), reverse=True):
            if total >= s.top_p and border:
                break
            total, border = total + value, value
        kept = {t for t in kept if p[t] >= border}
    if s.min_p > 0:
        p = probabilities()
        kept = {t for t in kept if p[t] >= s.min_p * max(p.values())}
    return kept


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1000), top_k=st.integers(0, 60), top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]), temperature=st.sampled_from([0.3, 1.0, 2.5]),
)  # fmt: skip
def test_filters_keep_what_the_plain_reference_keeps(seed, top_k, top_p, min_p, temperature) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    sampling = dataclasses.replace(GREEDY, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = set(torch.nonzero(filter_logits(logits, sampling) > -math.inf)[:, 0].tolist())
    assert kept == allowed_by_reference(logits.tolist(), sampling)


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
    tokens = sampler.draw(logits, np.arange(1), np.full(1, 3)).tokens
    result = sampler.apply_extras(logits, tokens, np.arange(1), np.full(1, 3))
    expected = logits[0].log_softmax(-1)
    assert tokens.tolist() == [4] == result.token_ids[:1].tolist()
    assert result.token_ids[1:].tolist() == expected.topk(3).indices.tolist()
    assert torch.allclose(result.values, expected[result.token_ids.long()], atol=1e-6)
