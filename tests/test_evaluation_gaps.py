"""How far a pass was from going the other way: an answer for every decision that replay makes."""

from __future__ import annotations

import pytest
import torch
from test_ddtree_build import random_blocks

from ddtree.build import build_trees
from ddtree.cost import RoundCost, cost_budgets
from ddtree.replay import ranks_in
from evaluation.acceptors import list_acceptors
from evaluation.gaps import Decisions
from evaluation.scores import SlotScores

BUDGET = 16
FLAT = RoundCost((1.0,) * (BUDGET + 1))
"""Nodes are free, as on a GPU: the tree takes all it may have."""
RISING = RoundCost(tuple(1.0 + 0.02 * n for n in range(BUDGET + 1)))


@pytest.mark.parametrize("cost", [FLAT, RISING], ids=["flat", "rising"])
def test_every_decision_has_a_gap(cost: RoundCost) -> None:
    top = random_blocks(40, BUDGET + 1, "peaked", seed=3)
    num_anchors, num_slots, num_children = top.shape
    gold = torch.randint(num_children, (num_anchors, num_slots), generator=torch.manual_seed(4))
    scores = SlotScores(
        top_log_probs=top,
        gold_log_probs=top.gather(2, gold[..., None])[..., 0],
        gold_child_ranks=gold,
        num_gold=torch.full((num_anchors,), num_slots),
    )
    trees = build_trees(top, BUDGET + 1)
    decisions = Decisions(scores, trees, ranks_in(trees, gold, scores.num_gold), cost)
    sizes = cost_budgets(trees, cost)
    if cost is FLAT:
        assert bool((sizes == BUDGET).all()), "the case at issue: nothing was left out by its price"
    acceptors = list_acceptors(("chain", "tree", "tree_spine", "tree_cost"), (4, BUDGET), cost)
    for acceptor in acceptors:
        gaps = [
            decisions.gap_nats(anchor, depth, acceptor)
            for anchor in range(num_anchors)
            for depth in range(1, num_slots + 1)
        ]
        assert min(gaps) >= 0
