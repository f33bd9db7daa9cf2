"""Drafter temperatures, one a slot, fitted on held-out rows: how sure slots are of themselves, weighed against each other.

For slot k the temperature is 1 / b with b the minimum of the mean of

    logsumexp(b z) - b z_gold        over held-out anchors, z the slot's logits,

which is convex in b: its slope is E_q[z] - z_gold and its curvature Var_q[z], so a guarded Newton iteration needs a
few passes over the head. It never changes a slot's order of tokens: the chain is left alone and the trees are not.
Source: temperature scaling, Guo et al., arXiv:1706.04599, here a slot.

A walk gets to slot k only if the recorded tokens before it are a node of the tree, so only those anchors count for slot k.
Over all anchors a drafter that was trained for the tree looks over-confident where no walk ever is, its deep slots are
flattened, and the tree loses: docs/decoding.md has what was measured. Which anchors count depends on the temperatures; the two
are found in turn until they agree.

n anchors, L = K-1 slots, H hidden, V vocabulary, B tree budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.features import FeatureRow
from ddtree.build import build_trees
from ddtree.replay import ranks_in
from drafter.model import Drafter
from evaluation.scores import find_responses, score_slots, slot_states
from target.head import TargetHead

BOUND = 20.0
"""Temperatures stay between 1 / BOUND and BOUND: a slot that is always right has no minimum."""
MAX_PASSES = 12
MAX_ROUNDS = 8
"""Of temperatures and the slots they reach; they agree after three or four."""
ANCHORS_PER_TREE_BATCH = 256
CPU_GROUP_BYTES = 2**24
"""Of float64 logits that are worked on at once on a CPU."""
FIT_RULE = "slots that a walk reaches"
"""Which slots count: part of what a kept judgement is of."""
_CONVERGED = 1e-4


@dataclass(frozen=True)
class TemperatureFit:
    """A value a slot; the losses are the mean negative log-likelihood in nats of the recorded tokens that count."""

    temperatures: tuple[float, ...]
    nll_before: tuple[float, ...]
    """At temperature 1."""
    nll_after: tuple[float, ...]
    num_tokens: tuple[int, ...]
    """Recorded tokens that count; a slot without any keeps temperature 1."""
    budget: int
    """Of the trees whose walks reach a slot or do not."""


@torch.no_grad()
def fit_temperatures(
    drafter: Drafter,
    head: TargetHead,
    rows: Iterable[FeatureRow],
    anchors_per_row: int,
    budget: int,
    head_chunk_rows: int = 1024,
) -> TemperatureFit:
    """Fitted on at most `anchors_per_row` anchors of each row, evenly spaced in its first response."""
    parts = [part for row in rows if (part := _blocks(drafter, head, row, anchors_per_row))]
    if not parts:
        raise ValueError("no row has a response of two tokens to fit the drafter's temperatures on")
    hidden, gold, num_gold = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    blocks = Blocks(hidden, gold, num_gold, head, head_chunk_rows)
    return _fit(blocks, budget)


def _blocks(
    drafter: Drafter, head: TargetHead, row: FeatureRow, num_anchors: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of a row's anchors: hidden states (n, L, H), recorded tokens (n, L) and how many of them there are (n,)."""
    responses = find_responses(row.loss_mask)
    if not responses:
        return None
    first, num_drafted = responses[0].first, responses[0].num_drafted
    device, num_slots = head.head.device, drafter.config.block_size - 1
    count = min(num_anchors, num_drafted)
    anchors = first + (torch.arange(count, device=device) * num_drafted) // count  # (n,)
    last = first + num_drafted
    places = anchors[:, None] + torch.arange(1, num_slots + 1, device=device)  # (n, L)
    gold = row.input_ids.to(device)[places.clamp(max=last)]
    return slot_states(drafter, head, row, anchors), gold, (last - anchors).clamp(max=num_slots)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Held-out blocks, and the head that turns their states into logits."""

    hidden: Tensor  # (n, L, H)
    gold: Tensor  # (n, L); beyond num_gold of no meaning
    num_gold: Tensor  # (n,)
    head: TargetHead
    chunk_rows: int

    @property
    def recorded(self) -> Tensor:
        """(n, L) bool: there is a recorded token."""
        slots = torch.arange(self.gold.shape[1], device=self.gold.device)
        return slots < self.num_gold[:, None]

    def reached(self, temperatures: Tensor, budget: int) -> Tensor:
        """(n, L) bool: recorded, and the recorded tokens before it are a node of the tree (the root is one)."""
        ranks = [
            self._ranks(slice(start, start + ANCHORS_PER_TREE_BATCH), temperatures, budget)
            for start in range(0, len(self.gold), ANCHORS_PER_TREE_BATCH)
        ]
        is_node = torch.cat(ranks)[:, :-1] <= budget
        return self.recorded & torch.cat([torch.ones_like(is_node[:, :1]), is_node], 1)

    def _ranks(self, part: slice, temperatures: Tensor, budget: int) -> Tensor:
        [scores] = score_slots(
            self.hidden[part],
            self.gold[part],
            self.num_gold[part],
            self.head,
            budget,
            [temperatures.float()],
            self.chunk_rows,
        )
        trees = build_trees(scores.top_log_probs, budget)
        return ranks_in(trees, scores.gold_child_ranks, scores.num_gold)

    def tokens(self, mask: Tensor) -> _Tokens:
        """The slots of `mask` (n, L)."""
        slots = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        return _Tokens(
            self.hidden[mask],
            self.gold[mask],
            slots[mask],
            mask.shape[1],
            self.head.head,
            self.chunk_rows,
        )


def _fit(blocks: Blocks, budget: int) -> TemperatureFit:
    """All recorded slots first; then those that the trees of the temperatures found reach, until these stay the same."""
    at_one = torch.ones(blocks.gold.shape[1], dtype=torch.float64)
    tokens = blocks.tokens(mask := blocks.recorded)
    inverse, after = _newton(tokens, at_one)
    for _ in range(MAX_ROUNDS):
        reached = blocks.reached(1 / inverse, budget)
        if torch.equal(reached, mask):
            break
        tokens = blocks.tokens(mask := reached)
        # what changes is little: from where the last round ended
        inverse, after = _newton(tokens, inverse)
    return TemperatureFit(
        tuple((1 / inverse).tolist()),
        tuple(tokens.moments(at_one)[0].tolist()),
        tuple(after.tolist()),
        tuple(tokens.counts.tolist()),
        budget,
    )


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
            logits = self.hidden[chunk].to(self.head.dtype) @ self.head.T
            of_rows = logits, self.gold[chunk], per_row[chunk]
            # rows that stay in a CPU's cache: what follows is bound by memory there, several times
            group = (
                len(logits) if logits.is_cuda else max(1, CPU_GROUP_BYTES // (8 * len(self.head)))
            )
            groups = zip(*(values.split(group) for values in of_rows), strict=True)
            values = torch.cat([_moments(*rows) for rows in groups], 1)
            sums.index_add_(1, self.slot[chunk], values)
        return sums.cpu() / self.counts.clamp(min=1)


def _moments(logits: Tensor, gold: Tensor, inverse: Tensor) -> Tensor:
    """(3, rows) float64: loss, slope, curvature of each row, from logits (rows, V)."""
    shifted = logits.double()
    # the loss is logsumexp(b (z - z_gold)), and so is nothing large subtracted
    shifted -= shifted.gather(1, gold[:, None])
    weights = shifted * inverse[:, None]
    peak = weights.amax(1, keepdim=True)
    weights.sub_(peak).exp_()
    total = weights.sum(1)
    mean = torch.linalg.vecdot(weights, shifted) / total
    squares = shifted.sub_(mean[:, None]).square_()
    variance = torch.linalg.vecdot(weights, squares) / total
    return torch.stack([peak[:, 0] + total.log(), mean, variance])


def _newton(tokens: _Tokens, start: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse temperatures (L,) and the losses there, from those of `start`.

    Newton on all slots at once; a step that leaves the bracket halves it instead. A slot without tokens ends at 1.
    """
    is_given = tokens.counts > 0
    inverse = torch.where(is_given, start, 1.0)
    low, high = torch.full_like(start, 1 / BOUND), torch.full_like(start, BOUND)
    loss, slope, curvature = tokens.moments(inverse)
    for _ in range(MAX_PASSES - 1):
        low, high = torch.where(slope < 0, inverse, low), torch.where(slope > 0, inverse, high)
        step = inverse - slope / curvature.clamp(min=1e-30)
        is_inside = (step > low) & (step < high)
        # at the minimum rounding decides the slope's sign, and with it the bracket: a slot that is there stays
        is_there = (step / inverse - 1).abs() < _CONVERGED
        moved = torch.where(is_inside | is_there, step, (low * high).sqrt())
        moved = torch.where(is_given & (slope != 0), moved, inverse)
        has_converged = bool(((moved / inverse - 1).abs() < _CONVERGED).all())
        inverse = moved
        loss, slope, curvature = tokens.moments(inverse)
        if has_converged:
            break
    return inverse, loss
