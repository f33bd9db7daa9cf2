"""Acceptance without the target: where the recorded (gold) tokens stand in the drafter's order of prefixes.

The walk at budget B accepts the gold prefix of depth k if and only if its rank in the total order is at most B, so one
build of the largest budget answers every smaller one. Exact for greedy records, unbiased for sampled ones.

N anchors, L = K-1 drafted slots, M children listed a slot, B budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.build import TreeBatch, build_trees

_LOST = -2  # no node: the root is -1


def rank_prefixes(
    top_log_probs: Tensor,
    gold_log_probs: Tensor,
    gold_child_ranks: Tensor,
    num_gold: Tensor,
    max_budget: int,
) -> Tensor:
    """Rank, from 1, of every gold prefix in the total order; max_budget+1 where it is not in the tree of max_budget.

    top_log_probs: (N, L, M) descending a slot; M >= min(max_budget, V) loses nothing, a smaller M gives the ranks of the
    tree restricted to M children a node. gold_log_probs: (N, L), of the recorded tokens. gold_child_ranks: (N, L), their
    places in the top list, M or more where absent. num_gold: (N,), slots that have a record.
    Returns (N, L) int64, strictly rising along L up to the censored value.
    """
    recorded = _recorded(gold_child_ranks, num_gold)
    _check_same_slots(top_log_probs, gold_log_probs, gold_child_ranks, recorded)
    batch = build_trees(top_log_probs, max_budget)
    return ranks_in(batch, gold_child_ranks, num_gold)


def ranks_in(batch: TreeBatch, gold_child_ranks: Tensor, num_gold: Tensor) -> Tensor:
    """`rank_prefixes` for trees already built. Nodes are told by their place under their parent, never by their score."""
    budget = batch.parents.shape[1]
    recorded = _recorded(gold_child_ranks, num_gold)
    node = num_gold.new_full((gold_child_ranks.shape[0],), -1)  # (N,) the root
    ranks = torch.full_like(gold_child_ranks, budget + 1)
    for slot in range(gold_child_ranks.shape[1]):
        child = batch.parents == node[:, None]
        child &= (
            batch.child_ranks == gold_child_ranks[:, slot, None]
        )  # (N, B); padding has child rank -1
        found, place = child.max(dim=1)
        node = torch.where(found & recorded[:, slot], place, _LOST)
        ranks[:, slot] = torch.where(node >= 0, node + 1, budget + 1)
    return ranks


def accepted(ranks: Tensor, num_gold: Tensor, budget: int | Tensor) -> Tensor:
    """(N,) draft tokens the walk accepts at `budget`, one for all or (N,), at most the max_budget of `ranks` (N, L)."""
    budgets = budget[:, None] if isinstance(budget, Tensor) else budget
    return ((ranks <= budgets) & _recorded(ranks, num_gold)).sum(dim=1)


def chain_accepted(gold_child_ranks: Tensor, num_gold: Tensor) -> Tensor:
    """(N,) draft tokens accepted from the all-argmax chain: the leading slots whose gold token is the drafter's first."""
    first = (gold_child_ranks == 0) & _recorded(gold_child_ranks, num_gold)
    return first.long().cumprod(dim=1).sum(dim=1)


def replay_walk(accepted_per_anchor: Sequence[int], num_tokens: int) -> list[int]:
    """Tokens each verify pass emits when a recorded response r_0..r_n is decoded again.

    accepted_per_anchor[i]: accepted draft tokens with r_i as anchor, i in 0..n-1. num_tokens: n; r_0 is prefill's token and
    counts nowhere. The last pass is cut at r_n.
    """
    if len(accepted_per_anchor) != num_tokens:
        raise ValueError(
            f"{len(accepted_per_anchor)} anchors for {num_tokens} tokens after prefill's; give one anchor a token"
        )
    passes, anchor = [], 0
    while anchor < num_tokens:
        passes.append(min(accepted_per_anchor[anchor] + 1, num_tokens - anchor))
        anchor += passes[-1]
    return passes


def _recorded(slots: Tensor, num_gold: Tensor) -> Tensor:
    """(N, L) bool, the slots of (N, L) `slots` that have a recorded token."""
    return torch.arange(slots.shape[1], device=slots.device) < num_gold[:, None]


def _check_same_slots(
    top_log_probs: Tensor, gold_log_probs: Tensor, gold_child_ranks: Tensor, recorded: Tensor
) -> None:
    """A gold token's listed and own log-prob must agree: a table shifted by one slot would look like a weak drafter."""
    num_listed = top_log_probs.shape[2]
    listed = top_log_probs.gather(2, gold_child_ranks.clamp(0, num_listed - 1)[:, :, None])[:, :, 0]
    comparable = recorded & (gold_child_ranks < num_listed)
    own = torch.where(comparable, gold_log_probs, listed)
    assert torch.allclose(own.float(), listed.float(), rtol=1e-2, atol=1e-2), (
        "gold log-probs differ from the top list at the gold ranks: the two come from different slots"
    )
