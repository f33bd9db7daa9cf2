"""What depends on the step alone: the learning rate, and how far the loss has moved from its warm-up.

`step` counts optimizer steps from 0: the values are those the step itself uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.schema import TrainSection


@dataclass(frozen=True)
class LossPhase:
    """What of the loss changes from step to step."""

    share: float = 1.0
    """Of the recipe's losses; the rest is decayed cross-entropy."""
    surrogate_nats: float = 0.5


def learning_rate(step: int, train: TrainSection) -> float:
    """Linear warm-up, then `cosine`, or `wsd`: stable, and a linear decay over the last steps.

    WSD: MiniCPM, arXiv:2404.06395. The stable part does not depend on `train.steps`, so it can be continued.
    """
    warmup = round(train.lr_warmup_fraction * train.steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    low = train.min_learning_rate_ratio
    if train.schedule == "cosine":
        done = (step - warmup) / max(1, train.steps - warmup)
        return train.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
    decay = round(train.lr_decay_fraction * train.steps)
    left = train.steps - step
    return train.learning_rate * (low + (1 - low) * min(1.0, left / max(1, decay)))


def loss_share(step: int, train: TrainSection) -> float:
    """Share of the recipe's loss at this step; the rest is decayed cross-entropy (DESIGN section 7: warm-up, cross-fade).

    The first step is always warm-up: its mean weight must be known from the data.
    """
    if is_plain_ce(train) or step == 0:
        return 0.0
    start = train.ce_warmup_fraction * train.steps
    fade = train.crossfade_fraction * train.steps
    if step < start:
        return 0.0
    return min(1.0, (step - start) / fade) if fade > 0 else 1.0


def loss_phase(step: int, train: TrainSection) -> LossPhase:
    return LossPhase(loss_share(step, train), surrogate_nats(step, train))


def surrogate_nats(step: int, train: TrainSection) -> float:
    """tree_surrogate's softness: geometric from the first to the last of its two temperatures, warm-up to last step."""
    first, last = train.surrogate_temperatures_nats
    start = train.ce_warmup_fraction * train.steps
    done = (step - start) / max(1.0, train.steps - 1 - start)
    return first * (last / first) ** min(1.0, max(0.0, done))


def is_plain_ce(train: TrainSection) -> bool:
    """Whether the recipe's loss is what every other loss warms up with."""
    return set(train.losses) == {"ce"} and train.soft_label_share == 0


def is_decay_start(step: int, train: TrainSection) -> bool:
    """Whether wsd's decay begins with this step: a checkpoint taken here can be continued with more steps."""
    decay = round(train.lr_decay_fraction * train.steps)
    return train.schedule == "wsd" and decay > 0 and step == train.steps - decay


def is_settled(step: int, train: TrainSection) -> bool:
    """Whether the schedule at `step` is at its stable part: a run may be continued from here with other `train.steps`."""
    first, last = train.surrogate_temperatures_nats
    anneals = "tree_surrogate" in train.losses and first != last  # on the way to another last step
    return (
        train.schedule == "wsd"
        and not anneals
        and step >= round(train.lr_warmup_fraction * train.steps)
        and step <= train.steps - round(train.lr_decay_fraction * train.steps)
        and (is_plain_ce(train) or loss_share(step, train) == 1.0)
    )


def most_steps(step: int, train: TrainSection) -> int:
    """The largest `train.steps` with which a run may be continued from `step`, at which its own schedule is settled.

    10^12 where nothing bounds it.
    """
    loss = 0.0 if is_plain_ce(train) else train.ce_warmup_fraction + train.crossfade_fraction
    share = max(train.lr_warmup_fraction, loss)
    most = 10**12 if share == 0 else int((step + 1) / share) + 1
    while most > step and not is_settled(step, train.model_copy(update={"steps": most})):
        most -= 1
    return most
