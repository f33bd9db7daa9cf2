"""Slot weights: every loss here is cross-entropy with detached weights, so a loss is a rule for w.

N blocks, L = K-1 drafted slots. Everything is a pure function of small tensors: log_probs (N, L), the drafter's log-prob
of the label of each slot; mask (N, L), which slots have a label (a prefix of each row); thresholds (N,), the score of the
last node in the block's tree. The gradient is that of

    loss = sum_{n,j} w_nj (-log_probs_nj) / normaliser

with one normaliser for the whole global batch, never one per block: blocks with a long live path must weigh more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import LossName, TrainSection

GAMMA_BY_BLOCK_SIZE = ((8, 4.0), (10, 5.0), (16, 7.0))


@dataclass(frozen=True)
class Weighting:
    """The recipe's loss: which rule weighs the slots, and its constants."""

    loss: LossName
    gamma: float
    alpha: float
    budget: int
    temperature_nats: float

    @classmethod
    def from_recipe(cls, train: TrainSection, block_size: int) -> Weighting:
        return cls(
            loss=train.loss,
            gamma=train.decay_gamma or default_gamma(block_size),
            alpha=train.dpace_alpha,
            budget=train.tree_budget,
            temperature_nats=train.tree_temperature_nats,
        )

    def needs_tree(self, share: float) -> bool:
        return self.loss == "tree" and share > 0

    def weights(
        self, log_probs: Tensor, mask: Tensor, thresholds: Tensor | None, share: float
    ) -> Tensor:
        """(N, L) float32: decayed cross-entropy's weights, cross-faded into the recipe's by `share`; 0 without a label."""
        decayed = ce_weights(mask, self.gamma)
        if share == 0:
            return decayed
        if self.loss == "dpace":
            own = dpace_weights(log_probs, mask, self.alpha)
        else:
            assert thresholds is not None
            own = tree_weights(log_probs, mask, thresholds, self.temperature_nats)
        return (1 - share) * decayed + share * own


def ce_weights(mask: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for slot k = 1..L. Source: DFlash, arXiv:2602.06036."""
    slots = torch.arange(mask.shape[1], device=mask.device, dtype=torch.float32)
    return torch.exp(-slots / gamma) * mask


def dpace_weights(log_probs: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} q~_i with q~ = (1-alpha) q + alpha: what a chain may still gain from slot j on.

    Detached. Source: D-PACE, arXiv:2605.18810; here with one global normaliser (DESIGN section 7).
    """
    confidence = (1 - alpha) * log_probs.detach().float().exp() + alpha
    survival = confidence.cumprod(1) * mask
    return _sum_from(survival) * mask


def tree_weights(
    log_probs: Tensor, mask: Tensor, thresholds: Tensor, temperature_nats: float
) -> Tensor:
    """w_j = s_{j-1} + sum_{k>=j} s_k, s_k = sigma((l_k - theta) / T), s_0 = 1: D-PACE with the tree's survival.

    l_k, the sum of log_probs up to slot k, is the score of the label's prefix of depth k, and that prefix is in the tree
    if and only if l_k >= theta; so s_k is its soft survival. The first term is the walk being alive before slot j, the
    second what slot j still decides. theta is -inf for a tree that is not full. Detached. Source: DESIGN section 7.
    """
    scores = log_probs.detach().float().cumsum(1)
    survival = torch.sigmoid((scores - thresholds[:, None]) / temperature_nats) * mask
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    return (before + _sum_from(survival)) * mask


def default_gamma(block_size: int) -> float:
    """DFlash's 4, 5, 7 for blocks of 8, 10, 16 (arXiv:2602.06036), linear between, held at the ends."""
    low, high = GAMMA_BY_BLOCK_SIZE[0], GAMMA_BY_BLOCK_SIZE[-1]
    if block_size <= low[0]:
        return low[1]
    for (left, at_left), (right, at_right) in itertools.pairwise(GAMMA_BY_BLOCK_SIZE):
        if block_size <= right:
            return at_left + (at_right - at_left) * (block_size - left) / (right - left)
    return high[1]


def _sum_from(values: Tensor) -> Tensor:
    """(N, L) -> (N, L): entry j is the sum of entries j..L."""
    return values.flip(1).cumsum(1).flip(1)
