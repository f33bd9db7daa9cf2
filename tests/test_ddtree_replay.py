"""Walk, ranks and replay: the tables must say what a literal walk down the literal tree does, at every budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.build import build_tree, build_trees
from ddtree.replay import accepted, chain_accepted, rank_prefixes, ranks_in, replay_walk
from ddtree.tree import DraftTree, chain_tree
from ddtree.walk import walk_tree

NEVER_DRAFTED = 10**6


def random_case(seed: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """top log-probs (N, L, M), top ids (N, L, M), gold child ranks (N, L) with M for absent, num_gold (N,)."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks, num_slots, num_listed = 4, 5, 7
    shape = (num_blocks, num_slots, num_listed)
    logits = torch.randn(shape, generator=generator) * 2
    top = torch.log_softmax(logits, dim=-1)
    if kind == "ties":
        top = -torch.randint(0, 3, shape, generator=generator).float()
    elif kind == "holes":
        top = torch.where(torch.rand(shape, generator=generator) < 0.3, -torch.inf, top)
    top = top.sort(dim=-1, descending=True).values
    ids = torch.rand(num_blocks, num_slots, 12, generator=generator).argsort(dim=-1)
    likely = torch.rand(num_blocks, num_slots, generator=generator) ** 3
    gold = (likely * (num_listed + 1)).long()
    num_gold = torch.randint(0, num_slots + 1, (num_blocks,), generator=generator)
    return top, ids[:, :, :num_listed], gold, num_gold


def gold_log_probs(top: Tensor, gold: Tensor) -> Tensor:
    listed = torch.cat([top, torch.full_like(top[:, :, :1], -9.0)], dim=2)
    return listed.gather(2, gold[:, :, None])[:, :, 0]


def follow(tree: DraftTree, gold_tokens: list[int]) -> int:
    """Draft tokens accepted when the target says the gold tokens, then something never drafted."""
    after = [*gold_tokens, NEVER_DRAFTED]
    on_path = {node: tree.path(node) for node in range(len(tree))}
    target = torch.full((len(tree),), NEVER_DRAFTED)
    for node, path in on_path.items():
        drafted = tree.tokens[path[1:]].tolist()
        if drafted == after[: len(drafted)]:
            target[node] = after[len(drafted)]
    walked = walk_tree(tree, target)
    assert walked.nodes == tree.path(walked.nodes[-1])
    assert walked.bonus == target[walked.nodes[-1]]
    return len(walked.nodes) - 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["smooth", "ties", "holes"]))
def test_ranks_say_what_the_literal_walk_does_at_every_budget(seed: int, kind: str) -> None:
    top, ids, gold, num_gold = random_case(seed, kind)
    max_budget = 40  # M = 7 < B: the tree restricted to 7 children
    ranks = rank_prefixes(top, gold_log_probs(top, gold), gold, num_gold, max_budget)
    listed = torch.cat([ids, torch.full_like(ids[:, :, :1], NEVER_DRAFTED + 1)], dim=2)
    tokens = listed.gather(2, gold[:, :, None])[:, :, 0]
    for budget in (1, 2, 3, 5, 8, 13, 21, 40):
        expected = [
            follow(build_tree(3, top[n], ids[n], budget), tokens[n, : num_gold[n]].tolist())
            for n in range(top.shape[0])
        ]
        assert accepted(ranks, num_gold, budget).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["smooth", "ties"]))
def test_chain_accepted_is_the_walk_down_the_argmax_chain(seed: int, kind: str) -> None:
    top, ids, gold, num_gold = random_case(seed, kind)
    listed = torch.cat([ids, torch.full_like(ids[:, :, :1], NEVER_DRAFTED + 1)], dim=2)
    tokens = listed.gather(2, gold[:, :, None])[:, :, 0]
    expected = [
        follow(
            chain_tree(torch.cat([torch.tensor([3]), ids[n, :, 0]])),
            tokens[n, : num_gold[n]].tolist(),
        )
        for n in range(top.shape[0])
    ]
    assert chain_accepted(gold, num_gold).tolist() == expected


def test_ranks_by_hand() -> None:
    """The tree of test_two_slots_by_hand: (0) 1st, (0,1) 3rd; (1) 4th, (1,1) 6th; an absent token is censored."""
    top = torch.tensor([[-0.1, -2.4], [-0.2, -2.0]]).expand(3, 2, 2)
    gold = torch.tensor([[0, 1], [1, 1], [0, 2]])
    num_gold = torch.tensor([2, 2, 2])
    ranks = rank_prefixes(top, gold_log_probs(top, gold), gold, num_gold, 5)
    assert ranks.tolist() == [[1, 3], [4, 6], [1, 6]]
    ranks = rank_prefixes(top, gold_log_probs(top, gold), gold, torch.tensor([1, 0, 2]), 8)
    assert ranks.tolist() == [[1, 9], [9, 9], [1, 9]]
    assert torch.equal(ranks_in(build_trees(top, 8), gold, torch.tensor([1, 0, 2])), ranks)


def test_no_anchor_is_no_error() -> None:
    top = torch.zeros(0, 3, 4)
    ranks = rank_prefixes(
        top, torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0).long(), 8
    )
    assert accepted(ranks, torch.zeros(0).long(), 8).tolist() == []


def test_gold_of_another_slot_is_noticed() -> None:
    top, _, gold, _ = random_case(0, "smooth")
    full = torch.full((4,), 5)
    with pytest.raises(AssertionError, match="different slots"):
        rank_prefixes(top, gold_log_probs(top, gold).roll(1, dims=1), gold, full, 8)


def test_replay_walk_by_hand() -> None:
    """r_0 takes 2 and a bonus -> r_3; r_3 takes none -> r_4; r_4 would take 5, but the record ends at r_6."""
    assert replay_walk([2, 9, 9, 0, 5, 9], 6) == [3, 1, 2]
    assert replay_walk([0, 0, 0], 3) == [1, 1, 1]
    assert replay_walk([7], 1) == [1]
    assert replay_walk([], 0) == []
    with pytest.raises(ValueError, match="2 anchors for 3 tokens"):
        replay_walk([1, 1], 3)


def test_walk_distinguishes_equal_tokens_under_different_parents() -> None:
    tree = DraftTree(
        tokens=torch.tensor([1, 5, 6, 5, 5]),
        parents=torch.tensor([-1, 0, 0, 1, 2]),
        depths=torch.tensor([0, 1, 1, 2, 2]),
        child_ranks=torch.tensor([0, 0, 1, 0, 0]),
        log_probs=torch.zeros(5),
    )
    walked = walk_tree(tree, torch.tensor([6, 9, 5, 9, 8]))
    assert (walked.nodes, walked.bonus) == ([0, 2, 4], 8)
    walked = walk_tree(tree, torch.tensor([7, 5, 5, 5, 5]))
    assert (walked.nodes, walked.bonus) == ([0], 7)


def test_walk_refuses_another_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="one target token a node"):
        walk_tree(chain_tree(torch.tensor([1, 2])), torch.tensor([1]))
