"""Bootstrap intervals: the exact distribution by enumeration, known quantiles, and the coverage they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from evaluation.bootstrap import (
    NUM_DRAWS,
    interval,
    mean_interval,
    student_quantile,
    tail_probability,
)


def skewed(generator: np.random.Generator, num_prompts: int) -> np.ndarray:
    """Acceptance lengths as they look: at least 1, a long tail, mean 2."""
    return 1 + generator.exponential(1.0, num_prompts)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(4, 2.7764), (7, 2.3646), (19, 2.0930), (39, 2.0227), (200, 1.9719)]
)
def test_student_quantiles_are_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=1e-3)


def test_interval_cuts_the_exact_bootstrap_distribution_where_it_says() -> None:
    values = np.array([1.0, 1.37, 1.91, 2.83, 4.07, 5.2])
    exact = np.array([np.mean(drawn) for drawn in itertools.product(values, repeat=6)])
    found = mean_interval(values)
    assert found is not None
    tail = tail_probability(6)
    noise = 4 * np.sqrt(tail / NUM_DRAWS) + 2 / NUM_DRAWS
    assert np.mean(exact < found[0]) == pytest.approx(tail, abs=noise)
    assert np.mean(exact > found[1]) == pytest.approx(tail, abs=noise)


def test_many_prompts_give_the_textbook_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 2000)
    found = mean_interval(values)
    assert found is not None
    width = 1.96 * values.std() / np.sqrt(2000)
    assert found == pytest.approx((values.mean() - width, values.mean() + width), abs=0.004)


def test_interval_moves_with_the_values_and_is_repeatable() -> None:
    values = skewed(np.random.default_rng(2), 30)
    found, moved = mean_interval(values), mean_interval(10 + 3 * values)
    assert found is not None
    assert moved == pytest.approx([10 + 3 * end for end in found])
    assert mean_interval(values) == found


def test_no_spread_gives_no_width_and_one_prompt_no_interval() -> None:
    assert mean_interval(np.full(9, 2.5)) == (2.5, 2.5)
    assert mean_interval(np.array([2.5])) is None
    assert mean_interval(np.array([])) is None


def test_columns_are_drawn_together() -> None:
    values = skewed(np.random.default_rng(3), 12)
    pairs = np.stack([values, 2 * values], axis=1)
    assert interval(pairs, lambda means: means[:, 1] / means[:, 0]) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("num_prompts", [8, 25])
def test_the_interval_covers_the_truth_as_often_as_it_says(num_prompts: int) -> None:
    """The plain percentile interval, which is what most benchmarks print, covers visibly less at 8 prompts."""
    generator = np.random.default_rng(4)
    runs, hits, plain_hits = 250, 0, 0
    draws = np.random.default_rng(0).integers(num_prompts, size=(1000, num_prompts))
    for _ in range(runs):
        values = generator.normal(2.0, 0.7, num_prompts)
        found = mean_interval(values)
        assert found is not None
        hits += found[0] <= 2.0 <= found[1]
        low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
        plain_hits += low <= 2.0 <= high
    # a binomial of 250 at 0.95 has a standard error of 0.014
    assert hits / runs == pytest.approx(0.95, abs=0.042)
    if num_prompts == 8:
        assert plain_hits / runs < 0.91
