"""The tree that is as large as pays: grow best-first and stop when tokens a second stop rising.

With n draft nodes a round is expected to emit E(n) = 1 + sum of the n best path probabilities (the walk accepts one token
for each node of the accepted path, and a node is on it with its path probability), and to take T(n) seconds. The tree
takes nodes while E(n) / T(n) rises: the n-th node while p_n T(n-1) > E(n-1) (T(n) - T(n-1)).

E is concave because probabilities fall in the total order. With T rising and convex the first n where the ratio stops
rising is its global maximum, so growing never has to look ahead. Hence `fit_convex`.
Source: the idea of cost-aware draft trees; the stopping rule from first principles.

N blocks, L = K-1 drafted slots, M children listed a slot, B largest budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree.build import ROOT, TreeBatch, as_tree, best_first, slot_costs
from ddtree.order import STEPS_PER_NAT
from ddtree.tree import DraftTree


@dataclass(frozen=True)
class RoundCost:
    """Seconds a round takes, by draft nodes."""

    seconds: tuple[float, ...]
    """T(0), ..., T(B): positive, not falling, convex."""

    def __post_init__(self) -> None:
        steps = np.diff(self.seconds)
        tolerance = 1e-9 * max(self.seconds)
        assert min(self.seconds) > 0, "a round takes time"
        assert (steps >= -tolerance).all(), "a larger tree takes longer"
        assert (np.diff(steps) >= -tolerance).all(), "the cost is not convex"

    @property
    def max_budget(self) -> int:
        return len(self.seconds) - 1


def build_cost_tree(
    anchor_token: int, top_log_probs: Tensor, top_ids: Tensor, cost: RoundCost
) -> DraftTree:
    """The first n* prefixes in the total order, n* from 0 to the cost's largest budget.

    top_log_probs: (L, M) floats, each slot sorted descending, M >= min(B, V); top_ids: (L, M), their tokens.
    """
    nodes, expected = [ROOT], 1.0
    seconds = cost.seconds
    for n, prefix in enumerate(best_first(slot_costs(top_log_probs, max(cost.max_budget, 1))), 1):
        prob = math.exp(-prefix[0] / STEPS_PER_NAT)
        if n > cost.max_budget:
            break
        if not prob * seconds[n - 1] > expected * (seconds[n] - seconds[n - 1]):
            break
        nodes.append(prefix)
        expected += prob
    return as_tree(anchor_token, nodes, top_ids)


def cost_budgets(batch: TreeBatch, cost: RoundCost) -> Tensor:
    """(N,) int64: n* of each block. batch: trees of at least the cost's largest budget."""
    gain, price = _gain_and_price(batch, cost)
    return (gain > price).long().cumprod(1).sum(1)


def decision_gaps(batch: TreeBatch, cost: RoundCost) -> Tensor:
    """(N, B) nats of path probability by which each node is from being judged the other way; inf in padding."""
    gain, price = _gain_and_price(batch, cost)
    gaps = (gain.log() - price.log()).abs()
    return torch.where(gain > 0, gaps, torch.inf)


def _gain_and_price(batch: TreeBatch, cost: RoundCost) -> tuple[Tensor, Tensor]:
    """The two sides of the stopping rule for every node, (N, B) float64; a gain of 0 in padding."""
    probs = batch.scores[:, : cost.max_budget].double().exp()
    expected = 1 + probs.cumsum(1) - probs  # E(n-1)
    seconds = torch.tensor(cost.seconds, dtype=torch.float64, device=probs.device)
    return probs * seconds[:-1], expected * seconds.diff()
