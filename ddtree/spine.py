"""The tree with the chain guaranteed inside: at small budgets a pure best-first tree may drop the chain's deep end.

The spine is the prefixes of first choices, the root aside. A tree of budget B is the spine and then the other prefixes in
the total order, the first B of that sequence. So here too a smaller budget is a prefix of a larger one, a parent comes
before its children (an ancestor off the spine scores at least as much), and a walk down the spine commits in place.

N blocks, L = K-1 drafted slots, M children listed a slot, B tree budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from ddtree.build import ROOT, Prefix, TreeBatch, as_tree, best_first, slot_costs
from ddtree.order import IMPOSSIBLE, fixed_point, require_budget
from ddtree.replay import ranks_in
from ddtree.tree import DraftTree


def build_spine_tree(
    anchor_token: int, top_log_probs: Tensor, top_ids: Tensor, budget: int
) -> DraftTree:
    """The spine, then the best other prefixes: `budget` nodes without the root, fewer if fewer are possible.

    top_log_probs: (L, M) floats, each slot sorted descending, M >= min(budget, V); top_ids: (L, M), their tokens.
    """
    require_budget(budget)
    costs = slot_costs(top_log_probs, budget)
    nodes = _spine(costs, budget)
    place = {0: 0}  # of a popped prefix in the tree
    for popped, prefix in enumerate(best_first(costs), start=1):
        if len(nodes) > budget:
            break
        cost, depth, path, parent = prefix
        if any(path):
            place[popped] = len(nodes)
            nodes.append((cost, depth, path, place[parent]))
        else:
            place[popped] = depth
    return as_tree(anchor_token, nodes, top_ids)


def _spine(costs: list[list[float]], budget: int) -> list[Prefix]:
    """The root and at most `budget` prefixes of first choices, those that are possible."""
    never = float(-IMPOSSIBLE)
    path_costs = takewhile(lambda cost: cost < never, accumulate(slot[0] for slot in costs))
    spine: list[Prefix] = [(cost, k, (0,) * k, k - 1) for k, cost in enumerate(path_costs, start=1)]
    return [ROOT, *spine[:budget]]


@dataclass(frozen=True, eq=False)
class SpineOrder:
    """The nodes of a TreeBatch, and the spine, in the order of spine trees."""

    places: Tensor  # (N, B) int64 from 1, of every node of the batch; beyond B+L in padding
    on_spine: Tensor  # (N, B) bool, of every node of the batch
    lengths: Tensor  # (N,) int64, nodes of the spine, whether they are in the batch or not

    def ranks(self, ranks: Tensor, gold_child_ranks: Tensor) -> Tensor:
        """Ranks of gold prefixes in this order, from their `ranks` (N, L) in the total order (ddtree/replay.py).

        Exact up to the batch's budget, censored as budget+1 beyond it.
        """
        budget, num_slots = self.places.shape[1], ranks.shape[1]
        depths = torch.arange(1, num_slots + 1, device=ranks.device)
        place = self.places.gather(1, (ranks - 1).clamp(max=budget - 1))
        # what is censored in the total order has at least as many others before it in this one
        place = torch.where(ranks <= budget, place, budget + 1)
        is_spine = (gold_child_ranks == 0).long().cumprod(1).bool()
        is_spine &= depths <= self.lengths[:, None]
        return torch.where(is_spine, depths, place).clamp(max=budget + 1)


def order_with_spine(batch: TreeBatch, top_log_probs: Tensor) -> SpineOrder:
    """batch: `build_trees(top_log_probs, budget)` of top_log_probs (N, L, M)."""
    first_choice = top_log_probs[:, :, :1]
    lengths = (fixed_point(first_choice)[..., 0].cumsum(1) > IMPOSSIBLE).sum(1)
    num_slots = torch.full_like(lengths, top_log_probs.shape[1])
    spine_ranks = ranks_in(batch, torch.zeros_like(first_choice[..., 0]).long(), num_slots)
    budget = batch.scores.shape[1]
    marks = batch.depths.new_zeros(batch.depths.shape[0], budget + 1)
    on_spine = marks.scatter_(1, spine_ranks - 1, 1)[:, :budget]  # the censored share a column
    nodes = torch.arange(1, budget + 1, device=lengths.device)
    others = lengths[:, None] + nodes - on_spine.cumsum(1)
    is_node = nodes <= batch.num_nodes[:, None]
    places = torch.where(on_spine.bool(), batch.depths, others)
    never = budget + top_log_probs.shape[1] + 1
    return SpineOrder(torch.where(is_node, places, never), on_spine.bool(), lengths)
