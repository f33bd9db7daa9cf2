"""From a drafter's per-slot log-probs to the B best prefixes, exactly, for one block or for hundreds at once.

`build_tree` is a heap on the host: the least latency for the one block of live decoding. `build_trees` goes down the slots
with tensors, on any device: training and replay. Both follow ddtree/order.py, and a smaller budget is a prefix of a larger one.

N blocks, L = K-1 drafted slots, M children listed a slot (M >= min(B, V) loses nothing), B tree budget, without the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ddtree.order import IMPOSSIBLE, as_nats, fixed_point, require_budget
from ddtree.tree import DraftTree

Prefix = tuple[float, int, tuple[int, ...], int]
"""cost (minus the fixed-point score), depth, child ranks, parent node. As tuples prefixes compare as the total order does."""

ROOT: Prefix = (0.0, 0, (0,), -1)


def build_tree(anchor_token: int, top_log_probs: Tensor, top_ids: Tensor, budget: int) -> DraftTree:
    """The first `budget` prefixes in the total order, as a tree; fewer if fewer are possible.

    top_log_probs: (L, M) floats, each slot sorted descending; top_ids: (L, M), the tokens they belong to.
    Source: DDTree, arXiv:2604.12989, with ties settled.
    """
    require_budget(budget)
    found = islice(best_first(slot_costs(top_log_probs, budget)), budget)
    return as_tree(anchor_token, [ROOT, *found], top_ids)


def slot_costs(top_log_probs: Tensor, budget: int) -> list[list[float]]:
    """(L, M) log-probs as costs in fixed point, at most `budget` a slot: no tree of that budget needs more."""
    return (-fixed_point(top_log_probs[:, :budget])).tolist()


def best_first(costs: list[list[float]]) -> Iterator[Prefix]:
    """All possible prefixes in the total order; a prefix's parent is the index of an earlier one, counted from 1 (0: root).

    costs: of `slot_costs`. After a popped prefix its next sibling and its first child are pushed, and no more: whatever
    else follows it comes after one of these two.
    """
    never = float(-IMPOSSIBLE)
    slots = [[*slot, never] for slot in costs]  # `never` stands after the last child
    slots.append([never])  # and below the last slot
    heap: list[Prefix] = [(slots[0][0], 1, (0,), 0)] if slots[0][0] < never else []
    popped = 0
    while heap:
        cost, depth, path, parent = prefix = heap[0]
        popped += 1
        rank, slot = path[-1], slots[depth - 1]
        sibling = cost - slot[rank] + slot[rank + 1]
        if sibling < never:
            heapreplace(heap, (sibling, depth, (*path[:-1], rank + 1), parent))
        else:
            heappop(heap)
        child = cost + slots[depth][0]
        if child < never:
            heappush(heap, (child, depth + 1, (*path, 0), popped))
        yield prefix


def as_tree(anchor_token: int, nodes: Sequence[Prefix], top_ids: Tensor) -> DraftTree:
    """nodes: the root, then prefixes with parents before children; top_ids: (L, M)."""
    path_costs, depths, paths, parents = zip(*nodes, strict=True)
    depth, rank = np.array(depths), np.array([path[-1] for path in paths])
    tokens = top_ids.cpu().numpy()[depth - 1, rank].astype(np.int64)
    tokens[0] = anchor_token
    return DraftTree(
        tokens=torch.from_numpy(tokens),
        parents=torch.from_numpy(np.array(parents)),
        depths=torch.from_numpy(depth),
        child_ranks=torch.from_numpy(rank),
        log_probs=as_nats(torch.from_numpy(0 - np.array(path_costs))),
    )


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """N trees without their roots, nodes in the total order. Rows with fewer than B nodes end in padding."""

    scores: Tensor  # (N, B) float32 nats, falling; -inf in padding. For losses: membership is the index.
    depths: Tensor  # (N, B) int64, from 1; 0 in padding
    parents: (
        Tensor  # (N, B) int64, index of the parent node; -1 where it is the root, and in padding
    )
    child_ranks: Tensor  # (N, B) int64, place in the slot's top list; -1 in padding
    num_nodes: Tensor  # (N,) int64


@torch.no_grad()
def build_trees(top_log_probs: Tensor, budget: int) -> TreeBatch:
    """The first `budget` prefixes in the total order of each of N blocks.

    top_log_probs: (N, L, M) floats, each slot sorted descending. Exact: with the parents of one depth sorted, child (i-th
    parent, j-th token) comes after (i+1)(j+1)-1 others of its depth, so about B ln B candidates a depth suffice.
    """
    require_budget(budget)
    steps = fixed_point(top_log_probs[:, :, :budget]).long()
    nodes = _Nodes.roots(steps, budget)
    parents = _Parents.roots(steps)
    for slot in range(steps.shape[1]):
        parents = nodes.take_children(parents, steps[:, slot])
        if parents.score.shape[1] == 0:  # children of what is in no tree are in no tree
            break
    return nodes.finish()


def tree_thresholds(batch: TreeBatch, budgets: Sequence[int]) -> Tensor:
    """(N, len(budgets)) float32: the score of the B-th prefix, in nats; -inf where the tree has fewer nodes."""
    return batch.scores[:, [budget - 1 for budget in budgets]]


@dataclass
class _Parents:
    """The nodes of one depth that are still in a tree, (N, P), in the total order; IMPOSSIBLE in padding."""

    score: Tensor
    node: Tensor  # column in the history of _Nodes
    lexical: Tensor  # a number that rises with the child ranks of the path

    @classmethod
    def roots(cls, steps: Tensor) -> _Parents:
        zero = steps.new_zeros(steps.shape[0], 1)
        return cls(zero, zero, zero)


@dataclass
class _Children:
    """Candidates of one depth: child `rank` of parent `parent`, for the C pairs that can be in a tree."""

    parent: Tensor  # (C,) index into _Parents
    rank: Tensor  # (C,)
    num_before: Tensor  # (N, P) candidates that come lexically before a parent's own

    @classmethod
    def of(cls, parents: _Parents, num_listed: int, budget: int) -> _Children:
        places = torch.arange(parents.score.shape[1])
        counts = (budget // (places + 1)).clamp(max=num_listed)
        parent = places.repeat_interleave(counts)
        rank = torch.arange(parent.shape[0]) - (counts.cumsum(0) - counts)[parent]
        order = parents.lexical.argsort(dim=1)
        counts, parent, rank = (table.to(order.device) for table in (counts, parent, rank))
        sorted_counts = counts[order]
        num_before = sorted_counts.cumsum(1) - sorted_counts
        return cls(parent, rank, torch.empty_like(order).scatter_(1, order, num_before))

    def sort_keys(self, parents: _Parents, slot: Tensor, bits: int) -> Tensor:
        """(N, C), score first, then lexically: from C down to 1 in the low bits."""
        num_children = self.rank.shape[0]
        places = torch.arange(slot.shape[1], device=slot.device)
        of_parent = (parents.score << bits) + (num_children - self.num_before)  # (N, P)
        of_rank = (slot << bits) - places  # (N, M)
        # gather beats indexing fourfold on a CPU
        rows = slot.shape[0], num_children
        return of_parent.gather(1, self.parent.expand(rows)) + of_rank.gather(
            1, self.rank.expand(rows)
        )

    def lexical(self, child: Tensor) -> Tensor:
        """0..C-1 for (N, P) candidates, rising with the child ranks of the path."""
        return self.num_before.gather(1, self.parent[child]) + self.rank[child]


class _Nodes:
    """The best B nodes found so far, and where every node ever kept came from."""

    def __init__(self, score: Tensor, budget: int):
        self.budget = budget
        self.score = score  # (N, B) in the total order; IMPOSSIBLE in padding
        self.node = torch.zeros_like(score)  # (N, B) history columns; 0, the root, in padding
        root = score.new_zeros(score.shape[0], 1)
        self.parent, self.rank, self.depth = [root], [root - 1], [root]  # history, (N, P) a depth

    @classmethod
    def roots(cls, steps: Tensor, budget: int) -> _Nodes:
        return cls(steps.new_full((steps.shape[0], budget), IMPOSSIBLE), budget)

    def take_children(self, parents: _Parents, slot: Tensor) -> _Parents:
        """Merge in the children that slot (N, M) gives `parents`; return those that are among the best B."""
        children = _Children.of(parents, slot.shape[1], self.budget)
        chosen = self._merge(parents, children, slot)
        return self._record(parents, children, chosen)

    def _merge(self, parents: _Parents, children: _Children, slot: Tensor) -> Tensor:
        """(N, B) indices into [nodes ; children] of the best B, in order. Every sort key is unique, so ties are settled:
        nodes so far are less deep and come first, in their order, then children lexically."""
        num_children = children.rank.shape[0]
        bits = (self.budget + num_children).bit_length()
        place = torch.arange(self.budget, 0, -1, device=slot.device)
        keys_so_far = (self.score << bits) + (num_children + place)
        keys = torch.cat([keys_so_far, children.sort_keys(parents, slot, bits)], dim=1)
        best = keys.topk(self.budget, dim=1)
        self.score = (best.values >> bits).clamp(min=IMPOSSIBLE)
        return best.indices

    def _record(self, parents: _Parents, children: _Children, chosen: Tensor) -> _Parents:
        """Add the chosen children to the history and compact them, (N, P)."""
        is_new = (chosen >= self.budget) & (self.score > IMPOSSIBLE)
        count = is_new.cumsum(1)
        num_new = int(count[:, -1].max()) if count.shape[0] else 0
        first = sum(part.shape[1] for part in self.parent)  # history columns so far
        old = self.node.gather(1, chosen.clamp(max=self.budget - 1))
        self.node = torch.where(
            is_new, first + count - 1, torch.where(chosen < self.budget, old, 0)
        )

        to = torch.where(is_new, count - 1, num_new)  # the last column collects what is not new

        def compact(values: Tensor, padding: int) -> Tensor:
            target = values.new_full((values.shape[0], num_new + 1), padding)
            return target.scatter_(1, to, values)[:, :num_new]

        child = compact((chosen - self.budget).clamp(min=0), 0)
        self.parent.append(parents.node.gather(1, children.parent[child]))
        self.rank.append(children.rank[child])
        self.depth.append(torch.full_like(child, len(self.depth)))
        node = torch.arange(first, first + num_new, device=child.device).expand_as(child)
        return _Parents(compact(self.score, IMPOSSIBLE), node, children.lexical(child))

    def finish(self) -> TreeBatch:
        parent, rank, depth = (
            torch.cat(part, dim=1) for part in (self.parent, self.rank, self.depth)
        )
        place = torch.arange(self.budget, device=self.node.device).expand_as(self.node)
        place_of = torch.full_like(parent, -1).scatter_(1, self.node, place)
        place_of[:, 0] = -1  # the root, which padding wrote to
        return TreeBatch(
            scores=as_nats(self.score),
            depths=depth.gather(1, self.node),
            parents=place_of.gather(1, parent.gather(1, self.node)),
            child_ranks=rank.gather(1, self.node),
            num_nodes=(self.score > IMPOSSIBLE).sum(dim=1),
        )
