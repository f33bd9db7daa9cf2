"""What is learned: every loss here is a rule for slot weights and, where it needs one, a distance to the target.

N blocks, L = K-1 drafted slots, P target tokens with known probability. A loss is a pure function of small tensors:

    loss = sum_{n,j} w_nj d_nj / normaliser

w: detached slot weights. d: cross-entropy to the recorded token (the label), to the target's distribution, or a distance to
it. One normaliser serves the whole global batch, never one a block: blocks with a long live path must weigh more. Losses
that are sums of a smooth function of label log-probs (chain, tree_surrogate) are written as the weights with the same
gradient, w_j = -d loss / d log q_j; so all of them share a unit, a normaliser and one weight a slot when they are mixed.
q_j: the drafter's probability of slot j's label; l_k = sum_{j<=k} log q_j: the score of the label's prefix of depth k.

Every loss that follows a walk has a survival s_k, how surely the label's prefix of depth k is accepted, and so expects
A = sum_k s_k draft tokens of a block. Its weights can be divided by (1 + A)^power (docs/losses.md, "Where walks start").
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.schema import SOFT_LOSSES, TREE_LOSSES, Config, LossName

GAMMA_BY_BLOCK_SIZE = ((8, 4.0), (10, 5.0), (16, 7.0))
SURROGATE_SCALE = 4.0
"""sigma' is at most 1/4: with it a slot at the threshold weighs 1 / nats / L."""
LIVE_CERTAIN, LIVE_FLOOR = 0.1, 0.02
"""tree_live: credit of a prefix the chain alone would keep, and the weight of a slot behind the break."""
SMALLEST_TAIL = 1e-6
"""What float32 can tell from 0 in 1 - sum q."""


@dataclass(frozen=True)
class TreeStatistics:
    """Where the labels stand in the block's own draft trees."""

    in_tree: Tensor  # (N, L) bool, the label's prefix is a node of the tree of train.tree_budget
    threshold: Tensor  # (N,), score of that tree's last node; -inf if it is not full
    surrogate_thresholds: Tensor  # (N, budgets), the same for tree_surrogate's budgets


@dataclass(frozen=True)
class SoftStatistics:
    """The target's likeliest tokens of each slot; the rest of its probability is one tail."""

    target_log_probs: Tensor  # (N, L, P)
    log_probs: Tensor  # (N, L, P) the drafter's of the same tokens, differentiable


@dataclass(frozen=True)
class SlotStatistics:
    log_probs: (
        Tensor  # (N, L) the drafter's of the labels, differentiable; any value without a label
    )
    mask: Tensor  # (N, L) bool, slots with a label: a prefix of each row
    is_first: Tensor  # (N, L) bool, the label is the drafter's first choice
    tree: TreeStatistics | None = None
    soft: SoftStatistics | None = None


@dataclass(frozen=True)
class LossTerms:
    terms: Tensor  # (N, L) differentiable, 0 without a label; their sum is the loss before it is normalised
    weights: Tensor  # (N, L) detached, what the normaliser counts


@dataclass(frozen=True)
class LossMix:
    """The recipe's losses, their weights and their constants."""

    losses: dict[LossName, float]
    gamma: float
    soft_label_share: float = 0.0
    dpace_alpha: float = 0.5
    tree_budget: int = 64
    tree_nats: float = 3.0
    surrogate_budgets: tuple[int, ...] = (64,)
    lk_eta: float = 3.0
    soft_label_sharpness: float = 1.0
    walk_powers: Mapping[LossName, float] = field(default_factory=dict)
    """By loss, power of `walk_discount`; 0 where a loss is absent."""

    @classmethod
    def from_recipe(cls, config: Config) -> LossMix:
        train = config.train
        return cls(
            losses=train.losses,
            gamma=train.decay_gamma or default_gamma(config.drafter.block_size),
            soft_label_share=train.soft_label_share,
            soft_label_sharpness=config.soft_label_sharpness,
            dpace_alpha=train.dpace_alpha,
            tree_budget=train.tree_budget,
            tree_nats=train.tree_temperature_nats,
            surrogate_budgets=train.surrogate_budgets or (train.tree_budget,),
            lk_eta=train.lk_eta,
            walk_powers=train.walk_powers,
        )

    @property
    def budgets(self) -> tuple[int, ...]:
        """Of the trees it needs; none if it needs none."""
        surrogate = self.surrogate_budgets if "tree_surrogate" in self.losses else ()
        return (self.tree_budget, *surrogate) if TREE_LOSSES & set(self.losses) else ()

    @property
    def needs_soft(self) -> bool:
        return self.soft_label_share > 0 or not SOFT_LOSSES.isdisjoint(self.losses)

    def terms(self, slots: SlotStatistics, share: float, surrogate_nats: float) -> LossTerms:
        """Decayed cross-entropy to the labels, cross-faded into the recipe's losses by `share` in 0..1.

        surrogate_nats: tree_surrogate's softness at this step.
        """
        parts = [
            (share * w, self._loss(name, slots, surrogate_nats))
            for name, w in self.losses.items()
            if share > 0
        ]
        if share < 1:
            weights = ce_weights(slots.mask, self.gamma)
            parts.append((1 - share, _weighted(weights, -slots.log_probs)))
        terms = torch.stack([factor * part.terms for factor, part in parts]).sum(0)
        return LossTerms(terms, torch.stack([f * part.weights for f, part in parts]).sum(0))

    def _loss(self, name: LossName, slots: SlotStatistics, surrogate_nats: float) -> LossTerms:
        log_probs, mask, power = slots.log_probs, slots.mask, self.walk_powers.get(name, 0.0)
        match name:
            case "ce":
                return self._cross_entropy(ce_weights(mask, self.gamma), slots)
            case "dpace":
                return self._cross_entropy(
                    dpace_weights(log_probs, mask, self.dpace_alpha, power), slots
                )
            case "auf":
                return self._cross_entropy(auf_weights(slots.is_first, mask, power), slots)
            case "chain":
                return self._cross_entropy(chain_weights(log_probs, mask, power), slots)
            case "kl" | "tv" | "lk":
                assert slots.soft is not None
                distance = {"kl": kl, "tv": tv, "lk": lambda soft: lk(soft, self.lk_eta)}[name]
                return _weighted(ce_weights(mask, self.gamma), distance(slots.soft))
        assert slots.tree is not None
        tree = slots.tree
        match name:
            case "tree":
                return self._cross_entropy(
                    tree_weights(log_probs, mask, tree.threshold, self.tree_nats, power), slots
                )
            case "tree_live":
                return self._cross_entropy(
                    tree_live_weights(tree.in_tree, slots.is_first, mask, power), slots
                )
            case "tree_surrogate":
                return self._surrogate(slots, tree.surrogate_thresholds, surrogate_nats, power)

    def _cross_entropy(self, weights: Tensor, slots: SlotStatistics) -> LossTerms:
        """Weighted cross-entropy to labels of the recipe's temperature: hard, soft, or a share of both."""
        distance = -slots.log_probs
        if self.soft_label_share > 0:
            assert slots.soft is not None
            soft = soft_cross_entropy(slots.soft)
            distance = (1 - self.soft_label_share) * distance + self.soft_label_share * soft
        return _weighted(weights, distance)

    def _surrogate(
        self, slots: SlotStatistics, thresholds: Tensor, nats: float, power: float
    ) -> LossTerms:
        hard = _weighted(
            surrogate_weights(slots.log_probs, slots.mask, thresholds, nats, power),
            -slots.log_probs,
        )
        share = self.soft_label_share
        if share == 0:
            return hard
        assert slots.soft is not None
        soft = coverage(slots.log_probs, slots.mask, slots.soft, thresholds, nats, power)
        return LossTerms(
            (1 - share) * hard.terms + share * soft.terms,
            (1 - share) * hard.weights + share * soft.weights,
        )


def ce_weights(mask: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k-1)/gamma) for slot k = 1..L. Source: DFlash, arXiv:2602.06036."""
    slots = torch.arange(mask.shape[1], device=mask.device, dtype=torch.float32)
    return torch.exp(-slots / gamma) * mask


def walk_discount(survival: Tensor, power: float) -> Tensor:
    """(N, 1): (1 + A)^-power, A = sum_k s_k of survival (N, L), the draft tokens a loss expects of a block.

    Decoding takes one pass where uniform anchors lie A + 1 times: power 1 weighs blocks as often as walks start at them, and
    makes the gradient of A that of log(1 + A). Power 2 is the gradient of the number of passes. Source: derived here.
    """
    return (1 + survival.sum(1, keepdim=True)) ** -power


def dpace_weights(log_probs: Tensor, mask: Tensor, alpha: float, power: float = 0.0) -> Tensor:
    """w_j = sum_{m>=j} prod_{i<=m} q~_i with q~ = (1-alpha) q + alpha: what a chain may still gain from slot j on.

    Source: D-PACE, arXiv:2605.18810; here with one global normaliser (DESIGN section 7).
    """
    survival = ((1 - alpha) * _scores(log_probs).exp() + alpha).cumprod(1) * mask
    return _sum_from(survival) * mask * walk_discount(survival, power)


def chain_weights(log_probs: Tensor, mask: Tensor, power: float = 0.0) -> Tensor:
    """w_j = sum_{k>=j} prod_{i<=k} q_i: the gradient of sum_k prod_{i<=k} q_i, the draft tokens a chain may expect.

    Source: the chain reward of arXiv:2606.11552. It wins the chain and loses large trees: a baseline.
    """
    return dpace_weights(log_probs, mask, alpha=0.0, power=power)


def auf_weights(is_first: Tensor, mask: Tensor, power: float = 0.0) -> Tensor:
    """w_j = 1 up to and with the first label that is not the drafter's first choice, 0 behind it.

    Source: accept until fail, arXiv:2607.01893.
    """
    kept = (is_first & mask).float().cumprod(1)
    return _alive_before(is_first & mask) * mask * walk_discount(kept, power)


def tree_weights(
    log_probs: Tensor, mask: Tensor, threshold: Tensor, nats: float, power: float = 0.0
) -> Tensor:
    """w_j = s_{j-1} + sum_{k>=j} s_k, s_k = sigma((l_k - theta) / nats), s_0 = 1: D-PACE with the tree's survival.

    The label's prefix of depth k is in the tree if and only if l_k >= theta, the score of the last node; so s_k is its soft
    survival. The first term is the walk being alive before slot j, the second what slot j still decides. The first slot
    weighs 1 + A: with power 1 it weighs 1 in every block, and a later one the share of that which it still decides.
    threshold: (N,), -inf for a tree that is not full. Source: DESIGN section 7.
    """
    survival = torch.sigmoid((_scores(log_probs).cumsum(1) - threshold[:, None]) / nats) * mask
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
    return (before + _sum_from(survival)) * mask * walk_discount(survival, power)


def tree_live_weights(
    in_tree: Tensor,
    is_first: Tensor,
    mask: Tensor,
    power: float = 0.0,
    certain: float = LIVE_CERTAIN,
    floor: float = LIVE_FLOOR,
) -> Tensor:
    """w_j = floor + sum_{k>=j} u_k: the hard form of `tree`.

    u_k = 1 for a prefix that is in the tree but not the all-argmax chain and for the first one lost, `certain` for one
    that is in the tree and all-argmax, 0 behind the first one lost. With one child a depth and both constants 0 it is AUF,
    fully accepted blocks aside. Source: DESIGN section 7.
    """
    kept = (in_tree & mask).float().cumprod(1)
    breaker = _alive_before(in_tree & mask) * mask - kept
    all_first = (is_first & mask).float().cumprod(1)
    credit = torch.where(all_first > 0, certain * kept, kept) + breaker
    return (floor + _sum_from(credit)) * mask * walk_discount(kept, power)


def surrogate_weights(
    log_probs: Tensor, mask: Tensor, thresholds: Tensor, nats: float, power: float = 0.0
) -> Tensor:
    """The gradient of 4/L sum_k sigma((l_k - theta_B) / nats), averaged over budgets: w_j = 4/L sum_{k>=j} sigma'_k / nats.

    A smooth count of the label's prefixes in the tree; theta (N, budgets) is held fixed. Source: DESIGN section 7.
    """
    inside, slope = _sigmoids(_scores(log_probs).cumsum(1), thresholds, nats)
    slope = SURROGATE_SCALE / mask.shape[1] * slope
    return _sum_from(slope * mask) * mask * walk_discount(inside * mask, power)


def coverage(
    log_probs: Tensor,
    mask: Tensor,
    soft: SoftStatistics,
    thresholds: Tensor,
    nats: float,
    power: float = 0.0,
) -> LossTerms:
    """4/L sum_k sum_v p_k(v) sigma((l_{k-1} + log q_k(v) - theta_B) / nats): the surrogate with the target's distribution.

    The prefix is the recorded one, its next token any of the target's: less variance than the label alone. Written with
    its gradient's coefficients, c_kv for the target's tokens and sum_v c_mv, m > k, for the label before them.
    Source: DESIGN section 7.
    """
    own, target = _scores(soft.log_probs), _scores(soft.target_log_probs).exp()
    before = _scores(log_probs).cumsum(1) - _scores(log_probs)  # (N, L): l_{k-1}
    inside, slope = (
        part.view(own.shape)
        for part in _sigmoids((before[..., None] + own).flatten(1), thresholds, nats)
    )
    discount = walk_discount((target * inside).sum(-1) * mask, power)
    coefficients = SURROGATE_SCALE / mask.shape[1] * target * slope * (mask * discount)[..., None]
    of_slot = coefficients.sum(-1)
    later = (_sum_from(of_slot) - of_slot) * mask
    terms = -(coefficients * soft.log_probs).sum(-1) - later * log_probs.masked_fill(~mask, 0)
    return LossTerms(terms, of_slot + later)


def sharpened(target_log_probs: Tensor, power: float) -> Tensor:
    """(..., P) log-probs of p^power / sum p^power: the distribution at temperature 1 / power of the stored one.

    The tokens of the tail are known only together; as none is likelier than the last one kept, their powers add up to
    tail x p_P^(power-1) at most, which is what is taken for them. power: at least 1, where it changes nothing.
    """
    log_p = _scores(target_log_probs)
    tail = _tail(log_p).log() + (power - 1) * log_p.amin(-1)
    powers = power * log_p
    total = torch.logaddexp(powers.logsumexp(-1), tail)
    return powers - total[..., None]


def soft_cross_entropy(soft: SoftStatistics) -> Tensor:
    """(N, L): -sum_v p(v) log q(v) - p_tail log q_tail, nats."""
    p, tail = _scores(soft.target_log_probs).exp(), _tail(_scores(soft.target_log_probs))
    return -(p * soft.log_probs).sum(-1) - tail * _tail(soft.log_probs).log()


def kl(soft: SoftStatistics) -> Tensor:
    """(N, L): KL(p || q) over the target's tokens and the tail, nats. Source: DistillSpec, arXiv:2310.08461."""
    log_p = _scores(soft.target_log_probs)
    tail = _tail(log_p)
    return soft_cross_entropy(soft) + (log_p.exp() * log_p).sum(-1) + tail * tail.log()


def tv(soft: SoftStatistics) -> Tensor:
    """(N, L): half the sum of |p - q| over the target's tokens and the tail: 1 - what chain rejection sampling accepts.

    Source: DistillSpec, arXiv:2310.08461; exact for the bucketed distributions.
    """
    log_p = _scores(soft.target_log_probs)
    inside = (log_p.exp() - soft.log_probs.exp()).abs().sum(-1)
    return 0.5 * (inside + (_tail(log_p) - _tail(soft.log_probs)).abs())


def lk(soft: SoftStatistics, eta: float) -> Tensor:
    """(N, L): lambda KL + (1 - lambda) TV with lambda = exp(-eta * overlap), the overlap 1 - TV detached.

    TV alone learns little where the two hardly overlap. Source: the hybrid of LK losses, arXiv:2602.23881.
    """
    distance = tv(soft)
    share = torch.exp(-eta * (1 - distance.detach()))
    return share * kl(soft) + (1 - share) * distance


def default_gamma(block_size: int) -> float:
    """DFlash's 4, 5, 7 for blocks of 8, 10, 16 (arXiv:2602.06036), linear between, held at the ends."""
    low, high = GAMMA_BY_BLOCK_SIZE[0], GAMMA_BY_BLOCK_SIZE[-1]
    if block_size <= low[0]:
        return low[1]
    for (left, at_left), (right, at_right) in itertools.pairwise(GAMMA_BY_BLOCK_SIZE):
        if block_size <= right:
            return at_left + (at_right - at_left) * (block_size - left) / (right - left)
    return high[1]


def _weighted(weights: Tensor, distance: Tensor) -> LossTerms:
    """A distance where there is no label may be anything, but for NaN: it must not reach the sum."""
    return LossTerms(weights * distance.masked_fill(weights == 0, 0), weights)


def _scores(log_probs: Tensor) -> Tensor:
    """Detached, at least float32."""
    log_probs = log_probs.detach()
    return log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))


def _sigmoids(scores: Tensor, thresholds: Tensor, nats: float) -> tuple[Tensor, Tensor]:
    """sigma((score - theta) / nats) of (N, scores) and its slope by the score, averaged over the (N, budgets) thresholds."""
    inside = torch.sigmoid((scores[..., None] - thresholds[:, None]) / nats)
    return inside.mean(-1), (inside * (1 - inside)).mean(-1) / nats


def _tail(log_probs: Tensor) -> Tensor:
    """(N, L): 1 - sum_v exp(log_probs), not below what float32 resolves (and without gradient there)."""
    return (1 - log_probs.exp().sum(-1)).clamp(min=SMALLEST_TAIL)


def _alive_before(kept: Tensor) -> Tensor:
    """(N, L): 1 in a slot all of whose predecessors are kept."""
    alive = kept.float().cumprod(1)
    return torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], dim=1)


def _sum_from(values: Tensor) -> Tensor:
    """(N, L) -> (N, L): entry j is the sum of entries j..L."""
    return values.flip(1).cumsum(1).flip(1)
