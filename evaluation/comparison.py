"""Two decodes of the same prompts, prompt by prompt: the difference of acceptance lengths and its paired interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evaluation.acceptance import PromptPasses, prompt_means
from evaluation.bootstrap import interval, mean_interval


@dataclass(frozen=True)
class Comparison:
    """`second` against `first`; intervals are 95 %, paired by prompt, None for fewer than 2 prompts."""

    num_prompts: int
    first: float
    """Macro mean over the prompts that have passes."""
    second: float
    difference: float
    """second - first, tokens a pass."""
    ci95: tuple[float, float] | None
    relative: float
    """second / first - 1."""
    relative_ci95: tuple[float, float] | None
    num_better: int
    """Prompts whose acceptance length is greater in `second`."""
    num_worse: int

    @property
    def verdict(self) -> str:
        """`better` or `worse` where the interval leaves out 0, else `no difference shown`."""
        if self.ci95 is not None and self.ci95[0] > 0:
            return "better"
        if self.ci95 is not None and self.ci95[1] < 0:
            return "worse"
        return "no difference shown"

    def to_json(self) -> dict[str, Any]:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return values | {"verdict": self.verdict}


def compare_prompts(
    first: Sequence[PromptPasses], second: Sequence[PromptPasses]
) -> Comparison | None:
    """Over the prompts that have passes in both (a sampled response may end at once); None if there is none.

    Swapping the two negates `difference` and its interval exactly. Raises ValueError if the prompts are not the same.
    """
    odd = {prompt.prompt_id for prompt in first} ^ {prompt.prompt_id for prompt in second}
    if odd:
        raise ValueError(
            f"{len(odd)} prompts, {min(odd)} among them, are in one of the two only; decode the same ones"
        )
    means, others = prompt_means(first), prompt_means(second)
    shared = sorted(means.keys() & others.keys())
    if not shared:
        return None
    pairs = np.array([[means[key], others[key]] for key in shared])  # (n, 2)
    a, b = pairs.mean(axis=0)
    changes = pairs[:, 1] - pairs[:, 0]
    return Comparison(
        num_prompts=len(pairs),
        first=float(a),
        second=float(b),
        difference=float(changes.mean()),
        ci95=mean_interval(changes),
        relative=float(b / a - 1),
        relative_ci95=interval(pairs, lambda drawn: drawn[:, 1] / drawn[:, 0] - 1),
        num_better=int((changes > 0).sum()),
        num_worse=int((changes < 0).sum()),
    )
