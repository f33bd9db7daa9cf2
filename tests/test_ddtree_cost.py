"""The tree that stops growing where it no longer pays: the stop is the global best, one by one and in batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ddtree_build import ids_for, random_blocks, small_blocks, tree_paths
from torch import Tensor

from ddtree.build import build_tree, build_trees
from ddtree.convex import fit_convex
from ddtree.cost import RoundCost, build_cost_tree, cost_budgets, decision_gaps

FREE = RoundCost((1.0,) * 65)
STEEP = RoundCost(tuple(1.0 + n for n in range(65)))


@st.composite
def costs(draw: st.DrawFn) -> RoundCost:
    """Rising and convex: steps that do not fall."""
    steps = sorted(draw(st.lists(st.floats(0, 0.5), min_size=24, max_size=24)))
    return RoundCost(tuple(itertools.accumulate(steps, initial=draw(st.floats(0.1, 3)))))


def best_size(log_probs: Tensor, cost: RoundCost) -> tuple[int, list[float]]:
    """The size with the largest ratio by looking at all of them; of equal ones the smallest."""
    scores = build_tree(7, log_probs, ids_for(log_probs), cost.max_budget).log_probs[1:].double()
    expected = [1.0, *(1 + scores.exp().cumsum(0)).tolist()]
    rates = [e / t for e, t in zip(expected, cost.seconds, strict=False)]
    return max(range(len(rates)), key=rates.__getitem__), rates


@settings(max_examples=200, deadline=None)
@given(small_blocks(), costs())
def test_the_stop_is_the_global_best(log_probs: Tensor, cost: RoundCost) -> None:
    tree = build_cost_tree(7, log_probs, ids_for(log_probs), cost)
    best, rates = best_size(log_probs, cost)
    assert rates[len(tree) - 1] == pytest.approx(rates[best], rel=1e-6)
    whole = build_tree(7, log_probs, ids_for(log_probs), cost.max_budget)
    assert tree_paths(tree) == tree_paths(whole)[: len(tree) - 1]


@settings(max_examples=100, deadline=None)
@given(small_blocks(), costs())
def test_one_by_one_and_batched_agree(log_probs: Tensor, cost: RoundCost) -> None:
    batch = build_trees(torch.stack([log_probs, log_probs.flip(0)]), 40)
    gaps = decision_gaps(batch, cost)
    for n, block in enumerate((log_probs, log_probs.flip(0))):
        size = len(build_cost_tree(7, block, ids_for(block), cost)) - 1
        found = int(cost_budgets(batch, cost)[n])
        if size != found:  # float32 scores may tie with a price
            assert gaps[n, min(size, found)] < 1e-6


def test_free_nodes_are_all_taken_and_dear_ones_are_not() -> None:
    log_probs = random_blocks(20, 64, "peaked", seed=1)
    batch = build_trees(log_probs, 64)
    assert cost_budgets(batch, FREE).tolist() == batch.num_nodes.tolist()
    # a node that doubles the round's time pays only with a probability above one: never
    assert cost_budgets(batch, STEEP).tolist() == [0] * 20
    assert len(build_cost_tree(3, log_probs[0], ids_for(log_probs[0]), STEEP)) == 1


def test_the_size_depends_on_the_block_by_hand() -> None:
    """T(n) = 1 + n/20. First choices of 0.98: all 15 pay (the last: 0.74 * 1.7 > 13.5 / 20), their siblings do not.

    Five equal tokens a slot: the five of slot 1 pay (the last: 0.2 * 1.2 > 1.8 / 20); then 0.04 * 1.25 < 2 / 20.
    """
    cost = RoundCost(tuple(1.0 + 0.05 * n for n in range(65)))
    sure = torch.tensor([[0.98, 0.005, 0.005, 0.005, 0.005]] * 15).log()
    unsure = torch.full((15, 5), 0.2).log()
    assert cost_budgets(build_trees(torch.stack([sure, unsure]), 64), cost).tolist() == [15, 5]


@pytest.mark.parametrize(
    "seconds", [(1.0, 0.5), (1.0, 2.0, 2.5), (0.0, 1.0)], ids=["falls", "concave", "no time"]
)
def test_costs_that_would_stop_too_early_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        RoundCost(seconds)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.05, 5), min_size=2, max_size=8))
def test_fit_is_the_nearest_rising_convex_curve(values: list[float]) -> None:
    """No small allowed change makes it nearer: raising the slope from any point on, or the level, up or down."""
    places = [0, 1, 2, 4, 8, 16, 32, 64][: len(values)]
    fitted = fit_convex(places, values)
    steps = np.diff(fitted)
    assert (steps >= -1e-9).all()
    assert (np.diff(steps) >= -1e-9).all()

    def error(curve: np.ndarray) -> float:
        return float(((curve[places] / np.array(values) - 1) ** 2).sum())

    grid, least = np.arange(places[-1] + 1), error(fitted)
    for change in [np.ones(len(grid)), *(np.maximum(grid - place, 0.0) for place in places[:-1])]:
        for step in (1e-4, -1e-4):
            moved = fitted + step * change
            slopes = np.diff(moved, prepend=moved[0])[1:]
            allowed = moved[0] >= 0 and (slopes >= 0).all() and (np.diff(slopes) >= -1e-12).all()
            assert not allowed or error(moved) >= least - 1e-12


def test_fit_keeps_a_curve_that_is_rising_and_convex_already() -> None:
    places = [0, 1, 2, 4, 8, 16]
    values = [1.0 + 0.01 * n + 0.002 * n * n for n in places]
    np.testing.assert_allclose(fit_convex(places, values)[places], values, rtol=1e-9)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 1]), ([0, 0], [1, 1]), ([0, 1], [1, 0])])
def test_points_that_are_no_costs_are_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(ValueError, match="give positive costs at rising sizes"):
        fit_convex(x, y)
