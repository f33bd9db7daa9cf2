"""How far a decision of replay was from falling the other way, in nats: is a pass that differs a near-tie?

A recorded prefix is inside or outside an acceptor's tree. What could move it across the border is noise in the log-probs
of the border's nodes, of the first choice of a slot (chain and spine), or in the comparison that stopped tree_cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ddtree.build import TreeBatch
from ddtree.cost import RoundCost, cost_budgets, decision_gaps
from ddtree.spine import order_with_spine
from evaluation.acceptors import CHAIN, Acceptor
from evaluation.scores import SlotScores


@dataclass(frozen=True)
class Decisions:
    """Replay's trees, one node larger than any acceptor's: the first node outside is the rival of one inside."""

    scores: SlotScores
    trees: TreeBatch
    ranks: Tensor
    """(N, L), of the recorded prefixes in `trees`."""
    cost: RoundCost | None

    def gap_nats(self, anchor: int, depth: int, acceptor: Acceptor) -> float:
        """Of the recorded prefix of `depth` after `anchor`."""
        if acceptor == CHAIN:
            return self._first_choice_gap(anchor, depth)
        assert acceptor.budget is not None
        if acceptor.name == "tree_spine":
            border = self._spine_border(anchor, acceptor.budget)
            return min(
                self._border_gap(anchor, depth, border), self._first_choice_gap(anchor, depth)
            )
        if acceptor.name == "tree_cost":
            return self._cost_gap(anchor, depth)
        border = self.trees.scores[anchor, acceptor.budget - 1 : acceptor.budget + 1]
        return self._border_gap(anchor, depth, border)

    def _border_gap(self, anchor: int, depth: int, border: Tensor) -> float:
        """From the scores of the last node inside and the first one outside."""
        gold = self.scores.gold_log_probs[anchor, :depth].sum()
        return float((gold - border).abs().min()) if len(border) else float("inf")

    def _first_choice_gap(self, anchor: int, depth: int) -> float:
        """From the token that is the slot's first choice, or if that is the recorded one, from the second."""
        top = self.scores.top_log_probs[anchor, depth - 1]  # (M,)
        if int(self.scores.gold_child_ranks[anchor, depth - 1]) == 0:
            return float(top[0] - top[1])
        return float(top[0] - self.scores.gold_log_probs[anchor, depth - 1])

    def _spine_border(self, anchor: int, budget: int) -> Tensor:
        order = order_with_spine(self.trees, self.scores.top_log_probs)
        at_border = (order.places[anchor] == budget) | (order.places[anchor] == budget + 1)
        return self.trees.scores[anchor, at_border & ~order.on_spine[anchor]]

    def _cost_gap(self, anchor: int, depth: int) -> float:
        """Inside: any earlier node could have stopped the tree. Outside: all from the first one left out had to pay."""
        assert self.cost is not None
        gaps = decision_gaps(self.trees, self.cost)[anchor]
        size = int(cost_budgets(self.trees, self.cost)[anchor])
        rank = int(self.ranks[anchor, depth - 1])
        border = self.trees.scores[anchor, max(size - 1, 0) : size + 1]
        at_border = self._border_gap(anchor, depth, border)
        if rank <= size:
            return min(float(gaps[:rank].min()), at_border)
        left_out = gaps[size:rank]  # none where the tree took every node it may have
        return min(float(left_out.max()), at_border) if len(left_out) else at_border
