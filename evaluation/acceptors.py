"""The acceptors by name: how a drafted block becomes a tree, and so how many tokens a verify pass can yield.

    plain            no draft: the target alone
    chain            the drafter's first choice a slot, matched with the target's own tokens
    chain_rejection  a drawn token a slot, accepted by p/q: the sampler of servers, at temperature > 0 only
    tree             the B likeliest prefixes
    tree_spine       the chain, then the likeliest other prefixes, B in all
    tree_cost        the likeliest prefixes while expected tokens a second rise, at most B

All of them emit tokens of the target's distribution, for any drafter.
Shapes: L = K-1 drafted slots, M children listed a slot, B tree budget (nodes without the root).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import AcceptorName
from ddtree.build import build_tree
from ddtree.cost import RoundCost, build_cost_tree
from ddtree.spine import build_spine_tree
from ddtree.tree import DraftTree, chain_tree


@dataclass(frozen=True)
class Acceptor:
    name: str
    budget: int | None = None
    """Nodes without the root, for tree_cost the most; None for plain and the chains."""

    @property
    def key(self) -> str:
        """`plain`, `chain`, `tree-64`."""
        return self.name if self.budget is None else f"{self.name}-{self.budget}"


PLAIN = Acceptor("plain")
CHAIN = Acceptor("chain")
CHAIN_REJECTION = Acceptor("chain_rejection")


def tree_acceptor(budget: int) -> Acceptor:
    return Acceptor("tree", budget)


def spine_acceptor(budget: int) -> Acceptor:
    return Acceptor("tree_spine", budget)


def cost_acceptor(budget: int) -> Acceptor:
    return Acceptor("tree_cost", budget)


def list_acceptors(
    names: Sequence[AcceptorName], budgets: Sequence[int], cost: RoundCost | None
) -> list[Acceptor]:
    """In the order of all tables: the chains, then each kind of tree by budget, tree_cost once with its largest."""
    sizes = sorted(set(budgets))
    found = [acceptor for acceptor in (CHAIN, CHAIN_REJECTION) if acceptor.name in names]
    if "tree" in names:
        found += [tree_acceptor(budget) for budget in sizes]
    if "tree_spine" in names:
        found += [spine_acceptor(budget) for budget in sizes]
    if "tree_cost" in names:
        assert cost is not None, "tree_cost needs a measured cost"
        found.append(cost_acceptor(cost.max_budget))
    return found


def draft_tree(
    acceptor: Acceptor, anchor: int, log_probs: Tensor, ids: Tensor, cost: RoundCost | None
) -> DraftTree:
    """The tree of one block. log_probs, ids: (L, M) of its likeliest tokens, falling, on the CPU."""
    if acceptor.budget is None:
        return chain_tree(torch.cat([torch.tensor([anchor]), ids[:, 0]]))
    if acceptor.name == "tree_spine":
        return build_spine_tree(anchor, log_probs, ids, acceptor.budget)
    if acceptor.name == "tree_cost":
        assert cost is not None, "tree_cost needs a measured cost"
        return build_cost_tree(anchor, log_probs, ids, cost)
    return build_tree(anchor, log_probs, ids, acceptor.budget)
