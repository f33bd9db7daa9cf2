"""What every acceptor does at every anchor of a recorded response, were a pass to start there: the core of replay.

One build of the largest trees answers for all: a tree is the first B nodes of it, a spine tree the first B in another order,
and tree_cost the first n* of each block.
N anchors, L = K-1 slots, M children kept a slot, B budget of the largest trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.build import TreeBatch
from ddtree.cost import RoundCost, cost_budgets
from ddtree.replay import accepted, chain_accepted
from ddtree.spine import order_with_spine
from evaluation.acceptors import CHAIN, Acceptor
from evaluation.scores import SlotScores
from evaluation.sums import AcceptorOutcome, recorded_nodes


def anchor_outcomes(
    scores: SlotScores,
    trees: TreeBatch,
    ranks: Tensor,
    acceptors: Sequence[Acceptor],
    cost: RoundCost | None,
) -> dict[str, AcceptorOutcome]:
    """By acceptor key. trees: of at least the largest budget; ranks (N, L): of the recorded prefixes in `trees`."""
    return {acceptor.key: _outcome(scores, trees, ranks, acceptor, cost) for acceptor in acceptors}


def _outcome(
    scores: SlotScores, trees: TreeBatch, ranks: Tensor, acceptor: Acceptor, cost: RoundCost | None
) -> AcceptorOutcome:
    if acceptor == CHAIN:
        return _chain(scores)
    assert acceptor.budget is not None
    if acceptor.name == "tree_spine":
        return _spine_tree(scores, trees, ranks, acceptor.budget)
    if acceptor.name == "tree_cost":
        assert cost is not None
        return _tree(scores, trees, ranks, cost_budgets(trees, cost))
    assert acceptor.name == "tree", f"{acceptor.name} cannot be replayed"
    return _tree(scores, trees, ranks, torch.full_like(scores.num_gold, acceptor.budget))


def _chain(scores: SlotScores) -> AcceptorOutcome:
    num_slots = scores.gold_log_probs.shape[1]
    return AcceptorOutcome(
        chain_accepted(scores.gold_child_ranks, scores.num_gold),
        _chain_probs(scores).sum(1),
        torch.full_like(scores.num_gold, num_slots),
    )


def _tree(scores: SlotScores, trees: TreeBatch, ranks: Tensor, budgets: Tensor) -> AcceptorOutcome:
    """budgets: (N,)."""
    places = torch.arange(1, trees.scores.shape[1] + 1, device=budgets.device)
    return AcceptorOutcome(
        accepted(ranks, scores.num_gold, budgets),
        torch.where(places <= budgets[:, None], _node_probs(scores, trees), 0).sum(1),
        torch.minimum(trees.num_nodes, budgets),
    )


def _spine_tree(
    scores: SlotScores, trees: TreeBatch, ranks: Tensor, budget: int
) -> AcceptorOutcome:
    order = order_with_spine(trees, scores.top_log_probs)
    off_spine = (order.places <= budget) & ~order.on_spine
    depths = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    num_on_spine = order.lengths.clamp(max=budget)
    on_spine = torch.where(depths <= num_on_spine[:, None], _chain_probs(scores), 0).sum(1)
    return AcceptorOutcome(
        accepted(order.ranks(ranks, scores.gold_child_ranks), scores.num_gold, budget),
        on_spine + torch.where(off_spine, _node_probs(scores, trees), 0).sum(1),
        num_on_spine + off_spine.sum(1),
    )


def _chain_probs(scores: SlotScores) -> Tensor:
    """(N, L) float64 path probability of the chain at each depth that has a recorded token, else 0."""
    slots = torch.arange(1, scores.gold_log_probs.shape[1] + 1, device=scores.num_gold.device)
    probs = scores.top_log_probs[..., 0].double().cumsum(1).exp()
    return torch.where(slots <= scores.num_gold[:, None], probs, 0)


def _node_probs(scores: SlotScores, trees: TreeBatch) -> Tensor:
    """(N, B) float64 path probability of each node at a depth that has a recorded token, else 0."""
    return torch.where(recorded_nodes(trees, scores.num_gold), trees.scores.double().exp(), 0)
