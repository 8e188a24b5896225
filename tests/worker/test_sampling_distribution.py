"""Draws of the sampler follow the distribution that the documentation states, and no other (chi-square).

Each test has a control: the same draws do not fit a distribution of slightly other options.
"""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch

from minisgl.protocol import Sampling
from minisgl_worker.batch import SlotState
from minisgl_worker.sampler import Sampler
from tests.worker.checkpoints import GREEDY, make_admit, make_step

NUM_DRAWS = 12_000
CPU = torch.device("cpu")
LOGITS = [math.sin(1.7 * i) * 2.5 + 0.03 * i for i in range(40)]
PLAIN = dataclasses.replace(GREEDY, temperature=0.9)
# Options and a neighbour of theirs that must be told apart.
CASES = {
    "temperature": (PLAIN, dataclasses.replace(PLAIN, temperature=1.0)),
    "hot": (dataclasses.replace(PLAIN, temperature=2.0), dataclasses.replace(PLAIN, temperature=2.3)),
    "top_k": (dataclasses.replace(PLAIN, top_k=8), dataclasses.replace(PLAIN, top_k=9)),
    "top_p": (dataclasses.replace(PLAIN, top_p=0.7), dataclasses.replace(PLAIN, top_p=0.75)),
    "min_p": (dataclasses.replace(PLAIN, min_p=0.2), dataclasses.replace(PLAIN, min_p=0.13)),
    "all filters": (
        dataclasses.replace(PLAIN, temperature=1.5, top_k=15, top_p=0.9, min_p=0.5),
        dataclasses.replace(PLAIN, temperature=1.5, top_k=15, top_p=0.9),
    ),
}


def draw_tokens(sampling: Sampling, *, seeds: list[int], positions: list[int]) -> list[int]:
    """One draw from `LOGITS` for each pair of a seed and a position."""
    slots = SlotState(len(seeds), 1, CPU)
    admits = [make_admit(slot, [1], [0], sampling=sampling, seed=seed) for slot, seed in enumerate(seeds)]
    slots.apply(make_step(0, admits=tuple(admits)))
    sampler = Sampler(slots, len(LOGITS), CPU)
    rows = np.arange(len(seeds))
    for slot in rows.tolist():
        sampler.admit(slot)
    logits = torch.tensor(LOGITS).repeat(len(seeds), 1)
    chosen = sampler.draw(logits, rows, np.array(positions))
    if sampler.has_extras(rows):
        sampler.apply_extras(logits, chosen.tokens, chosen.failed, rows, np.array(positions))
    assert not chosen.failed.any()
    return chosen.tokens.tolist()


def expected_probabilities(sampling: Sampling) -> dict[int, float]:
    """Token id -> probability, from the definitions in docs/sampling.md."""

    def renormalize(p: dict[int, float]) -> dict[int, float]:
        return {token: value / sum(p.values()) for token, value in p.items()}

    order = sorted(range(len(LOGITS)), key=lambda token: -LOGITS[token])
    p = renormalize({token: math.exp(LOGITS[token] / sampling.temperature) for token in order})
    if sampling.top_k:
        p = renormalize(dict(list(p.items())[: sampling.top_k]))
    if sampling.top_p < 1.0:
        nucleus: dict[int, float] = {}
        for token, value in p.items():
            if sum(nucleus.values()) >= sampling.top_p:
                break
            nucleus[token] = value
        p = renormalize(nucleus)
    return renormalize({token: value for token, value in p.items() if value >= sampling.min_p * max(p.values())})


def misfit(draws: list, p: dict) -> float:
    """Chi-square in units of the value that a right sampler exceeds once in 300,000 times; infinite where a draw has
    probability 0. Outcomes expected fewer than 10 times are counted together."""
    counts = Counter(draws)
    if any(outcome not in p for outcome in counts):
        return math.inf
    bins = [(counts[outcome], value * len(draws)) for outcome, value in p.items()]
    large = [b for b in bins if b[1] >= 10]
    small = [b for b in bins if b[1] < 10]
    if small:
        large.append((sum(seen for seen, _ in small), sum(expected for _, expected in small)))
    chi_square = sum((seen - expected) ** 2 / expected for seen, expected in large)
    freedom = len(large) - 1
    # Wilson and Hilferty's cube: the quantile at 4.5 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.5 * math.sqrt(2 / (9 * freedom))) ** 3
    return chi_square / limit


@pytest.mark.parametrize(("sampling", "neighbour"), CASES.values(), ids=CASES)
def test_draws_of_many_seeds_follow_the_stated_distribution(sampling: Sampling, neighbour: Sampling) -> None:
    draws = draw_tokens(sampling, seeds=list(range(NUM_DRAWS)), positions=[5] * NUM_DRAWS)
    assert misfit(draws, expected_probabilities(sampling)) < 1
    assert misfit(draws, expected_probabilities(neighbour)) > 1


@pytest.mark.parametrize(("sampling", "neighbour"), CASES.values(), ids=CASES)
def test_draws_of_one_seed_along_its_positions_follow_the_stated_distribution(
    sampling: Sampling, neighbour: Sampling
) -> None:
    draws = draw_tokens(sampling, seeds=[2**63 + 11] * NUM_DRAWS, positions=list(range(NUM_DRAWS)))
    assert misfit(draws, expected_probabilities(sampling)) < 1
    assert misfit(draws, expected_probabilities(neighbour)) > 1


@pytest.mark.parametrize("step", ["seed", "position"])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(step: str) -> None:
    """Pairs of draws follow the product of their distributions. Control: pairs of which a tenth repeats its first."""
    sampling = dataclasses.replace(PLAIN, top_k=6)
    second = range(1, NUM_DRAWS + 1) if step == "seed" else range(NUM_DRAWS)
    first = draw_tokens(sampling, seeds=list(range(NUM_DRAWS)), positions=[5] * NUM_DRAWS)
    other = draw_tokens(sampling, seeds=list(second), positions=[5 if step == "seed" else 6] * NUM_DRAWS)
    single = expected_probabilities(sampling)
    product = {(a, b): p * q for a, p in single.items() for b, q in single.items()}
    assert misfit(list(zip(first, other, strict=True)), product) < 1
    copied = [a if i % 10 == 0 else b for i, (a, b) in enumerate(zip(first, other, strict=True))]
    assert misfit(list(zip(first, copied, strict=True)), product) > 1
