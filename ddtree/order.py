"""The one total order of prefixes, in arithmetic where it cannot be broken.

A prefix is a tuple of child ranks, one a slot. Prefixes are ordered by score (sum of their log-probs) descending, then
depth ascending, then ranks lexicographically ascending. The draft tree of budget B is the first B of them.

Scores are fixed-point, so sums are exact and have no order of addition: floats would not do, because two different
scores may round to the same float one depth further down, and then a child of the better parent could come second. The
step is far finer than the error of the float32 logits underneath. Float log-probs of exactly 0 are common, so a child may
tie with its parent: the order settles it by depth, and no code anywhere compares two float scores.

N blocks, L = K-1 drafted slots, M children listed a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS_PER_NAT = 2**32
"""Resolution of a score: 2.3e-10 nats."""
IMPOSSIBLE = -(2**45)
"""Score of what can never be drafted: -inf, or below -8192 nats. Nothing below it is in a tree either."""
MAX_BUDGET = 8192
"""Largest budget whose candidates of one depth fit, beside a score, into one int64 sort key."""


def fixed_point(top_log_probs: Tensor) -> Tensor:
    """(..., L, M) floats, each slot sorted descending -> the same in steps of 1/STEPS_PER_NAT: whole numbers from
    IMPOSSIBLE to 0, as float64, which adds them exactly (a path of 64 slots stays below 2**53).

    A log-prob above 0 is a rounding error of the head and counts as 0: a child never beats its parent.
    Raises ValueError for NaN or an unsorted slot.
    """
    steps = (top_log_probs.double() * STEPS_PER_NAT).clamp_(IMPOSSIBLE, 0).round_()
    falling = steps[..., 1:] <= steps[..., :-1]
    if not falling.all() or steps[..., 0].isnan().any():
        raise ValueError(
            "the drafter's top log-probs hold NaN or are not sorted in descending order; "
            "check the checkpoint, or sort the top list"
        )
    return steps


def as_nats(score: Tensor) -> Tensor:
    """Fixed-point scores as float32 nats; -inf for IMPOSSIBLE. For losses and reports, never for membership."""
    nats = (score / STEPS_PER_NAT).float()
    return torch.where(score > IMPOSSIBLE, nats, -torch.inf)


def require_budget(budget: int) -> None:
    """Raises ValueError unless 1 <= budget <= MAX_BUDGET."""
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(
            f"tree budget {budget} is outside 1..{MAX_BUDGET}; choose one of the two sizes or between"
        )
