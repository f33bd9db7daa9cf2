"""Drafter temperatures, one a slot, fitted on held-out rows: deeper slots are surer of themselves than they are right.

For slot k the temperature is 1 / b with b the minimum of the mean of

    logsumexp(b z) - b z_gold        over held-out anchors, z the slot's logits,

which is convex in b: its slope is E_q[z] - z_gold and its curvature Var_q[z], so a guarded Newton iteration needs a
few passes over the head. It never changes a slot's order of tokens, only how slots weigh against each other: the chain
is left alone and the trees are not. Source: temperature scaling, Guo et al., arXiv:1706.04599, here a slot.

n anchors, L = K-1 slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.features import FeatureRow
from drafter.model import Drafter
from evaluation.scores import find_responses, slot_states
from target.head import TargetHead

BOUND = 20.0
"""Temperatures stay between 1 / BOUND and BOUND: a slot that is always right has no minimum."""
MAX_PASSES = 12
_CONVERGED = 1e-4


@dataclass(frozen=True)
class TemperatureFit:
    """A value a slot; the losses are the mean negative log-likelihood in nats of the recorded tokens."""

    temperatures: tuple[float, ...]
    nll_before: tuple[float, ...]
    """At temperature 1."""
    nll_after: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """Recorded tokens looked at; a slot without any keeps temperature 1."""


@torch.no_grad()
def fit_temperatures(
    drafter: Drafter,
    head: TargetHead,
    rows: Iterable[FeatureRow],
    anchors_per_row: int,
    head_chunk_rows: int = 1024,
) -> TemperatureFit:
    """Fitted on at most `anchors_per_row` anchors of each row, evenly spaced in its first response."""
    parts = [part for row in rows if (part := _states(drafter, head, row, anchors_per_row))]
    if not parts:
        raise ValueError("no row has a response of two tokens to fit the drafter's temperatures on")
    hidden, gold, slot = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    tokens = _Tokens(hidden, gold, slot, drafter.config.block_size - 1, head.head, head_chunk_rows)
    return _newton(tokens)


def _states(
    drafter: Drafter, head: TargetHead, row: FeatureRow, num_anchors: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of every slot with a recorded token: hidden states (m, H), the token (m,) and the slot's index (m,)."""
    responses = find_responses(row.loss_mask)
    if not responses:
        return None
    first, num_drafted = responses[0].first, responses[0].num_drafted
    device, num_slots = head.head.device, drafter.config.block_size - 1
    count = min(num_anchors, num_drafted)
    anchors = first + (torch.arange(count, device=device) * num_drafted) // count  # (n,)
    places = anchors[:, None] + torch.arange(1, num_slots + 1, device=device)  # (n, L)
    recorded = places <= first + num_drafted
    hidden = slot_states(drafter, head, row, anchors)[recorded]
    gold = row.input_ids.to(device)[places.clamp(max=first + num_drafted)][recorded]
    slots = torch.arange(num_slots, device=device).expand_as(places)[recorded]
    return hidden, gold, slots


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Held-out slots, and the head that turns them into logits."""

    hidden: Tensor  # (m, H)
    gold: Tensor  # (m,)
    slot: Tensor  # (m,)
    num_slots: int
    head: Tensor  # (V, H)
    chunk_rows: int

    @property
    def counts(self) -> Tensor:
        return torch.bincount(self.slot.cpu(), minlength=self.num_slots)

    def moments(self, inverse: Tensor) -> Tensor:
        """(3, L) float64 means a slot at inverse temperatures (L,): loss, slope and curvature. One pass over the head."""
        sums = torch.zeros(3, self.num_slots, dtype=torch.float64, device=self.hidden.device)
        per_row = inverse.to(self.hidden.device)[self.slot]
        for start in range(0, len(self.slot), self.chunk_rows):
            chunk = slice(start, start + self.chunk_rows)
            logits = (self.hidden[chunk].to(self.head.dtype) @ self.head.T).double()
            values = _moments(logits, self.gold[chunk], per_row[chunk])
            sums.index_add_(1, self.slot[chunk], values)
        return sums.cpu() / self.counts.clamp(min=1)


def _moments(logits: Tensor, gold: Tensor, inverse: Tensor) -> Tensor:
    """(3, rows): loss, slope, curvature of each row."""
    wanted = logits.gather(1, gold[:, None])[:, 0]
    logits = (
        logits - wanted[:, None]
    )  # the loss is logsumexp(b (z - z_gold)), and so is nothing large subtracted
    scaled = logits * inverse[:, None]
    probs = scaled.softmax(1)
    mean = (probs * logits).sum(1)
    variance = (probs * (logits - mean[:, None]).square()).sum(1)
    return torch.stack([scaled.logsumexp(1), mean, variance])


def _newton(tokens: _Tokens) -> TemperatureFit:
    """Newton on the inverse temperatures of all slots at once; a step that leaves the bracket halves it instead."""
    inverse = torch.ones(tokens.num_slots, dtype=torch.float64)
    low, high = inverse / BOUND, inverse * BOUND
    is_given = tokens.counts > 0
    before, slope, curvature = tokens.moments(inverse)
    loss = before
    for _ in range(MAX_PASSES - 1):
        low, high = torch.where(slope < 0, inverse, low), torch.where(slope > 0, inverse, high)
        step = inverse - slope / curvature.clamp(min=1e-30)
        is_inside = (step > low) & (step < high)
        moved = torch.where(is_inside, step, (low * high).sqrt())
        moved = torch.where(is_given & (slope != 0), moved, inverse)
        has_converged = bool(((moved / inverse - 1).abs() < _CONVERGED).all())
        inverse = moved
        loss, slope, curvature = tokens.moments(inverse)
        if has_converged:
            break
    return TemperatureFit(
        tuple((1 / inverse).tolist()),
        tuple(before.tolist()),
        tuple(loss.tolist()),
        tuple(tokens.counts.tolist()),
    )
