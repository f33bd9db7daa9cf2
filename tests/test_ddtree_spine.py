"""The tree with a guaranteed spine: against its definition by brute force, and its ranks against literal walks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ddtree_build import Ranks, brute_force, ids_for, random_blocks, small_blocks, tree_paths
from test_ddtree_replay import follow, gold_log_probs, random_case
from torch import Tensor

from ddtree.build import build_trees
from ddtree.replay import accepted, chain_accepted, rank_prefixes
from ddtree.spine import build_spine_tree, order_with_spine

BUDGETS = (1, 2, 3, 5, 8, 13, 21, 40)


def by_definition(log_probs: Tensor, budget: int) -> list[Ranks]:
    """All prefixes in the total order, the spine moved to the front."""
    every = brute_force(log_probs, 10**6)
    spine = [ranks for ranks in every if not any(ranks)]
    return [*sorted(spine, key=len), *(ranks for ranks in every if any(ranks))][:budget]


@settings(max_examples=200, deadline=None)
@given(small_blocks(), st.integers(1, 70))
def test_spine_tree_is_its_definition(log_probs: Tensor, budget: int) -> None:
    tree = build_spine_tree(7, log_probs, ids_for(log_probs), budget)
    assert tree_paths(tree) == by_definition(log_probs, budget)
    assert (tree.parents[1:] < torch.arange(1, len(tree))).all(), "parents come first"
    tokens = ids_for(log_probs)[tree.depths[1:] - 1, tree.child_ranks[1:]]
    assert torch.equal(tree.tokens[1:], tokens)


@settings(max_examples=60, deadline=None)
@given(small_blocks(), st.integers(1, 70))
def test_node_places_are_the_order_of_spine_trees(log_probs: Tensor, budget: int) -> None:
    batch = build_trees(torch.stack([log_probs, log_probs.flip(0)]), budget)
    order = order_with_spine(batch, torch.stack([log_probs, log_probs.flip(0)]))
    wanted = {path: i for i, path in enumerate(by_definition(log_probs, 10**6), start=1)}
    found = brute_force(log_probs, budget)
    assert order.places[0, : len(found)].tolist() == [wanted[path] for path in found]
    assert order.on_spine[0, : len(found)].tolist() == [not any(path) for path in found]
    assert int(order.lengths[0]) == sum(not any(path) for path in wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["smooth", "ties", "holes"]))
def test_ranks_say_what_the_literal_walk_does_at_every_budget(seed: int, kind: str) -> None:
    top, ids, gold, num_gold = random_case(seed, kind)
    ranks = rank_prefixes(top, gold_log_probs(top, gold), gold, num_gold, max(BUDGETS))
    order = order_with_spine(build_trees(top, max(BUDGETS)), top)
    spine_ranks = order.ranks(ranks, gold)
    listed = torch.cat([ids, torch.full_like(ids[:, :, :1], 10**6 + 1)], dim=2)
    tokens = listed.gather(2, gold[:, :, None])[:, :, 0]
    for budget in BUDGETS:
        expected = [
            follow(build_spine_tree(3, top[n], ids[n], budget), tokens[n, : num_gold[n]].tolist())
            for n in range(top.shape[0])
        ]
        assert accepted(spine_ranks, num_gold, budget).tolist() == expected


def test_a_spine_tree_never_accepts_less_than_the_chain() -> None:
    """From B = L on; the pure tree does at small budgets, which is what the spine is for."""
    top = random_blocks(400, 8, "flat", seed=5)[:, :6]
    gold = torch.zeros(400, 6, dtype=torch.int64)
    num_gold = torch.full((400,), 6)
    ranks = rank_prefixes(top, top[:, :, 0], gold, num_gold, 40)
    spine_ranks = order_with_spine(build_trees(top, 40), top).ranks(ranks, gold)
    chain = chain_accepted(gold, num_gold)
    assert (accepted(ranks, num_gold, 8) < chain).any(), "the case needs trees that drop the chain"
    for budget in (6, 8, 40):
        assert torch.equal(accepted(spine_ranks, num_gold, budget), chain)


def test_by_hand() -> None:
    """Scores (0) -0.7, (1) -0.8, (0,0) -1.4, (1,0) -1.5, (0,1) -1.8: spine (0), (0,0) first, then (1), (1,0), (0,1)."""
    log_probs = torch.tensor([[-0.7, -0.8], [-0.7, -1.1]])
    tree = build_spine_tree(5, log_probs, torch.tensor([[11, 12], [21, 22]]), 5)
    assert tree.tokens.tolist() == [5, 11, 21, 12, 21, 22]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 1]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    order = order_with_spine(build_trees(log_probs[None], 5), log_probs[None])
    assert order.places.tolist() == [[1, 3, 2, 4, 5]]
