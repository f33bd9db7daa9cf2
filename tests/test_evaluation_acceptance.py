"""Acceptance length: numbers derived by hand."""

from __future__ import annotations

import pytest

from evaluation.acceptance import PromptPasses, acceptance_sums, measure_acceptance
from evaluation.rounds import cut


def prompt(*passes: int, name: str = "p") -> PromptPasses:
    return PromptPasses(name, "task", passes)


def test_macro_averages_prompts_and_micro_averages_passes() -> None:
    found = measure_acceptance([prompt(4, 2), prompt(1, 1, 1, 1)])
    assert (found.num_prompts, found.num_passes) == (2, 6)
    assert found.macro == pytest.approx((3.0 + 1.0) / 2)
    assert found.micro == pytest.approx(10 / 6)


def test_a_prompt_without_a_pass_is_in_no_mean() -> None:
    assert measure_acceptance([prompt(3), prompt()]) == measure_acceptance([prompt(3)])


def test_no_pass_at_all_has_no_acceptance() -> None:
    with pytest.raises(ValueError, match="none of 2 prompts"):
        measure_acceptance([prompt(), prompt()])


def test_interval_is_repeatable_holds_the_mean_and_vanishes_without_spread() -> None:
    prompts = [prompt(*([1 + index % 5] * 4)) for index in range(50)]
    found = measure_acceptance(prompts)
    assert found == measure_acceptance(prompts)
    assert found.ci95 is not None
    low, high = found.ci95
    # standard error of 50 values 1..5 (sd sqrt 2) is 0.2, so the interval is about 3 +- 0.39
    assert low == pytest.approx(3 - 0.39, abs=0.06)
    assert high == pytest.approx(3 + 0.39, abs=0.06)
    assert measure_acceptance([prompt(2, 2), prompt(2)]).ci95 == (2.0, 2.0)


def test_sums_of_parts_give_the_means_of_the_whole() -> None:
    a, b = [prompt(4, 2), prompt(1)], [prompt(5, 1, 1)]
    whole, part, other = acceptance_sums(a + b), acceptance_sums(a), acceptance_sums(b)
    assert whole.sum_of_prompt_means == part.sum_of_prompt_means + other.sum_of_prompt_means
    assert whole.macro == pytest.approx((3 + 1 + 7 / 3) / 3)
    assert whole.micro == pytest.approx(14 / 6)


@pytest.mark.parametrize(
    ("room", "kept"),
    [(9, [5, 6, 2]), (3, [5, 6, 2]), (2, [5, 6]), (1, [5])],
)
def test_nothing_after_eos_or_the_limit_is_emitted(room: int, kept: list[int]) -> None:
    assert cut([5, 6, 2, 7, 2], room, eos_token_ids=(2,)) == kept
