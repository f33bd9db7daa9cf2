"""Acceptance length: the one definition, for live decoding and for replay alike.

A verify pass emits the accepted draft tokens and the bonus token, cut at EOS and at max_new_tokens; prefill's token is of no
pass. A prompt's acceptance length is its emitted tokens over its passes. The macro mean (the headline, as in z-lab's
benchmark) averages prompts; the micro mean divides all emitted tokens by all passes. A prompt whose response is prefill's
token alone has no pass and no acceptance length: it is in no mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.bootstrap import interval, mean_interval


@dataclass(frozen=True)
class PromptPasses:
    """A prompt's verify passes in order: tokens emitted by each. Several responses (turns) of one prompt are joined."""

    prompt_id: str
    task: str
    passes: tuple[int, ...]


@dataclass(frozen=True)
class Acceptance:
    """Tokens a verify pass emits; `ci95` is of the macro mean, `micro_ci95` of the micro mean."""

    num_prompts: int
    num_passes: int
    macro: float
    micro: float
    ci95: tuple[float, float] | None
    micro_ci95: tuple[float, float] | None
    """None for a single prompt."""


@dataclass(frozen=True)
class AcceptanceSums:
    """Numerators and denominators of both means: what ranks add up before they divide."""

    sum_of_prompt_means: float
    num_prompts: int
    num_emitted: int
    num_passes: int

    @property
    def macro(self) -> float:
        return self.sum_of_prompt_means / self.num_prompts

    @property
    def micro(self) -> float:
        return self.num_emitted / self.num_passes


def acceptance_sums(prompts: Sequence[PromptPasses]) -> AcceptanceSums:
    means = list(_means(prompts))
    return AcceptanceSums(
        float(np.sum(means)),
        len(means),
        sum(sum(prompt.passes) for prompt in prompts),
        sum(len(prompt.passes) for prompt in prompts),
    )


def measure_acceptance(prompts: Sequence[PromptPasses]) -> Acceptance:
    """Both means with their 95 % intervals (bootstrap over prompts: evaluation/bootstrap.py).

    Raises ValueError if no prompt has a pass.
    """
    sums = acceptance_sums(prompts)
    if sums.num_passes == 0:
        raise ValueError(
            f"none of {len(prompts)} prompts has a verify pass; responses are too short"
        )
    return Acceptance(
        num_prompts=sums.num_prompts,
        num_passes=sums.num_passes,
        macro=sums.macro,
        micro=sums.micro,
        ci95=mean_interval(np.array(list(_means(prompts)))),
        micro_ci95=interval(_emitted_and_passes(prompts), lambda drawn: drawn[:, 0] / drawn[:, 1]),
    )


def prompt_means(prompts: Sequence[PromptPasses]) -> dict[str, float]:
    """Acceptance length by prompt id, of the prompts that have passes."""
    ids = [prompt.prompt_id for prompt in prompts if prompt.passes]
    return dict(zip(ids, _means(prompts), strict=True))


def _means(prompts: Sequence[PromptPasses]) -> Iterator[float]:
    return (sum(prompt.passes) / len(prompt.passes) for prompt in prompts if prompt.passes)


def _emitted_and_passes(prompts: Sequence[PromptPasses]) -> np.ndarray:
    """(n, 2) of the prompts that have passes."""
    return np.array([(sum(p.passes), len(p.passes)) for p in prompts if p.passes], dtype=float)
