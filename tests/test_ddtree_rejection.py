"""Rejection sampling of a chain: the output has the target's distribution, and the right number of drafts survives."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from ddtree.rejection import walk_by_rejection

# after token a (row), with a zero: what the target never says must never come out
TARGET = torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
DRAFTER = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.2, 0.2]])  # slot by slot, blind to the draft
NUM_RUNS = 5_000


def outcome(
    generator: torch.Generator, drafter: Tensor, anchor: int = 0
) -> tuple[tuple[int, ...], int]:
    """Tokens of one pass over a chain of two drafts, and how many were accepted."""
    drafted = torch.multinomial(drafter, 1, generator=generator)[:, 0]
    target = TARGET[torch.cat([torch.tensor([anchor]), drafted])]
    found = walk_by_rejection(target, drafter, drafted, generator)
    assert found.nodes == list(range(len(found.nodes)))
    num_accepted = len(found.nodes) - 1
    return (*drafted[:num_accepted].tolist(), found.bonus), num_accepted


def chi_square(counts: Counter, expected: dict[tuple[int, ...], float], total: int) -> float:
    assert set(counts) <= {outcome for outcome, mass in expected.items() if mass > 0}
    return sum(
        (counts[key] - total * mass) ** 2 / (total * mass)
        for key, mass in expected.items()
        if mass > 0
    )


def test_two_tokens_over_passes_have_the_targets_distribution() -> None:
    """A pass may end after one token; the next pass then gives the second one, as decoding does."""
    generator, counts = torch.Generator().manual_seed(0), Counter()
    for _ in range(NUM_RUNS):
        first, *rest = outcome(generator, DRAFTER)[0]
        second, *_ = rest or outcome(generator, DRAFTER, first)[0]
        counts[first, second] += 1
    expected = {
        (a, b): float(TARGET[0, a] * TARGET[a, b]) for a, b in itertools.product(range(3), repeat=2)
    }
    # 6 outcomes, 5 degrees of freedom: below 20.5 in 999 of 1000
    assert chi_square(counts, expected, NUM_RUNS) < 20.5


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    """P(first draft accepted) = sum_v min(p, q), Leviathan et al.; standard error 0.007."""
    generator = torch.Generator().manual_seed(1)
    accepted = sum(outcome(generator, DRAFTER)[1] > 0 for _ in range(NUM_RUNS))
    overlap = float(torch.minimum(TARGET[0], DRAFTER[0]).sum())
    assert accepted / NUM_RUNS == pytest.approx(overlap, abs=0.022)


def test_equal_distributions_are_never_refused_and_disjoint_ones_always() -> None:
    generator = torch.Generator().manual_seed(2)
    p = torch.tensor([[0.25, 0.75, 0.0]])
    for _ in range(200):
        drafted = torch.multinomial(p, 1, generator=generator)[:, 0]
        assert len(walk_by_rejection(p.expand(2, 3), p, drafted, generator).nodes) == 2
        other = torch.tensor([[0.0, 0.0, 1.0]])
        found = walk_by_rejection(p.expand(2, 3), other, torch.tensor([2]), generator)
        assert found.nodes == [0]
        assert found.bonus in (0, 1)


def test_sizes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="2 target and 2 drafter distributions for 2 drafted"):
        walk_by_rejection(TARGET[:2], DRAFTER, torch.tensor([0, 1]))
