"""The build against brute force, and the heap against the batched form, above all where scores tie."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.build import TreeBatch, build_tree, build_trees, tree_thresholds
from ddtree.order import IMPOSSIBLE, MAX_BUDGET, STEPS_PER_NAT
from ddtree.tree import DraftTree

Ranks = tuple[int, ...]

# zeros, near zeros that float sums lose, exact ties, impossible tokens, and one below the floor
VALUES = [
    0.0,
    -1e-12,
    -1e-8,
    -0.25,
    -0.5,
    -1.0,
    -1.0000001,
    -3.7,
    -30.0,
    -5000.0,
    -20000.0,
    -math.inf,
]


@st.composite
def small_blocks(draw: st.DrawFn) -> Tensor:
    """(L, M) float32, sorted a slot."""
    num_slots, num_listed = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    value = st.one_of(
        st.sampled_from(VALUES), st.floats(-5, 0, width=32), st.integers(-2, 0).map(float)
    )
    slot = st.lists(value, min_size=num_listed, max_size=num_listed)
    rows = draw(st.lists(slot, min_size=num_slots, max_size=num_slots))
    return torch.tensor([sorted(row, reverse=True) for row in rows], dtype=torch.float32)


def brute_force(log_probs: Tensor, budget: int) -> list[Ranks]:
    """Every prefix, sorted by the definition of the total order, in exact rational arithmetic."""
    slots = log_probs.tolist()
    scored = []
    for depth in range(1, len(slots) + 1):
        for ranks in itertools.product(range(len(slots[0])), repeat=depth):
            values = [slots[k][rank] for k, rank in enumerate(ranks)]
            if -math.inf in values:
                continue
            score = sum(round(Fraction(value) * STEPS_PER_NAT) for value in values)
            if score > IMPOSSIBLE:
                scored.append((-score, depth, ranks))
    return [ranks for _, _, ranks in sorted(scored)[:budget]]


def paths_of(parents: list[int], child_ranks: list[int]) -> list[Ranks]:
    """The rank path of every node; parents count from 0, -1 is the root."""
    paths: list[Ranks] = []
    for parent, rank in zip(parents, child_ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def tree_paths(tree: DraftTree) -> list[Ranks]:
    return paths_of((tree.parents[1:] - 1).tolist(), tree.child_ranks[1:].tolist())


def batch_paths(batch: TreeBatch, n: int) -> list[Ranks]:
    count = int(batch.num_nodes[n])
    return paths_of(batch.parents[n, :count].tolist(), batch.child_ranks[n, :count].tolist())


def ids_for(log_probs: Tensor) -> Tensor:
    """(L, M): rank r of slot k is token 1000 (k+1) + r."""
    num_slots, num_listed = log_probs.shape
    return 1000 * torch.arange(1, num_slots + 1)[:, None] + torch.arange(num_listed)


def random_blocks(num_blocks: int, num_listed: int, kind: str, seed: int) -> Tensor:
    """(N, 15, M) sorted log-probs. `ties`: coarse values with many exact zeros; `peaked`: like a trained drafter."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_blocks, 15, 1200, generator=generator)
    if kind == "ties":
        coarse = -torch.randint(0, 4, (num_blocks, 15, num_listed), generator=generator).float()
        return coarse.sort(dim=-1, descending=True).values
    scale = 8.0 if kind == "peaked" else 2.0
    return torch.log_softmax(logits * scale, dim=-1).topk(num_listed).values


@settings(max_examples=300, deadline=None)
@given(small_blocks(), st.integers(1, 70))
def test_heap_and_batch_equal_brute_force(log_probs: Tensor, budget: int) -> None:
    expected = brute_force(log_probs, budget)
    assert tree_paths(build_tree(7, log_probs, ids_for(log_probs), budget)) == expected
    other = log_probs.flip(0)  # a second block in the batch, to see that rows do not mix
    batch = build_trees(torch.stack([log_probs, other]), budget)
    assert batch_paths(batch, 0) == expected
    assert batch_paths(batch, 1) == brute_force(other, budget)


@pytest.mark.parametrize("kind", ["ties", "peaked", "flat"])
@pytest.mark.parametrize("budget", [1, 2, 17, 64, 300, 1024])
def test_heap_and_batch_agree_at_size(kind: str, budget: int) -> None:
    log_probs = random_blocks(3, min(budget, 1024), kind, seed=budget)
    batch = build_trees(log_probs, budget)
    for n in range(3):
        tree = build_tree(7, log_probs[n], ids_for(log_probs[n]), budget)
        assert torch.equal(tree.parents[1:] - 1, batch.parents[n])
        assert torch.equal(tree.child_ranks[1:], batch.child_ranks[n])
        assert torch.equal(tree.depths[1:], batch.depths[n])
        assert torch.equal(tree.log_probs[1:], batch.scores[n])


@pytest.mark.parametrize("kind", ["ties", "peaked", "flat"])
def test_smaller_budgets_and_lists_are_prefixes(kind: str) -> None:
    log_probs = random_blocks(4, 200, kind, seed=1)
    large = build_trees(log_probs, 200)
    for budget in (1, 5, 64):
        small = build_trees(log_probs[:, :, :budget], budget)  # M = B children lose nothing
        for name in ("scores", "depths", "parents", "child_ranks"):
            assert torch.equal(vars(small)[name], vars(large)[name][:, :budget])


def test_the_order_is_by_plain_scores_where_nothing_is_close() -> None:
    """A float64 enumeration that knows nothing of fixed point gives the same nodes."""
    log_probs = random_blocks(1, 4, "flat", seed=3)[0, :4]
    scored = [
        (-sum(log_probs[k, rank].item() for k, rank in enumerate(ranks)), len(ranks), ranks)
        for depth in range(1, 5)
        for ranks in itertools.product(range(4), repeat=depth)
    ]
    expected = [ranks for _, _, ranks in sorted(scored)[:60]]
    assert tree_paths(build_tree(7, log_probs, ids_for(log_probs), 60)) == expected


def test_two_slots_by_hand() -> None:
    """Scores -0.1 (0), -0.3 (0,0), -2.1 (0,1), -2.4 (1), -2.6 (1,0): in this order, with these tokens."""
    log_probs = torch.tensor([[-0.1, -2.4], [-0.2, -2.0]])
    tree = build_tree(5, log_probs, torch.tensor([[11, 12], [21, 22]]), 5)
    assert tree.tokens.tolist() == [5, 11, 21, 22, 12, 21]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]
    assert tree.depths.tolist() == [0, 1, 2, 2, 1, 2]
    assert tree.child_ranks.tolist() == [0, 0, 0, 1, 1, 0]
    torch.testing.assert_close(
        tree.log_probs, torch.tensor([0.0, -0.1, -0.3, -2.1, -2.4, -2.6]), rtol=0, atol=1e-6
    )
    assert tree.path(5) == [0, 4, 5]
    assert tree.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_all_zero_log_probs_grow_breadth_first_in_rank_order() -> None:
    batch = build_trees(torch.zeros(1, 3, 2), 9)
    expected = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert batch_paths(batch, 0) == expected


def test_a_log_prob_rounded_above_zero_never_beats_its_parent() -> None:
    log_probs = torch.tensor([[0.0, -1.0], [1e-7, -1.0]])
    for budget, expected in ((1, [(0,)]), (2, [(0,), (0, 0)])):
        assert tree_paths(build_tree(7, log_probs, ids_for(log_probs), budget)) == expected
        assert batch_paths(build_trees(log_probs[None], budget), 0) == expected


def test_thresholds_are_the_scores_of_the_last_nodes() -> None:
    log_probs = torch.tensor([[[-0.1, -2.4], [-0.2, -2.0]], [[-0.5, -math.inf], [-math.inf] * 2]])
    thresholds = tree_thresholds(build_trees(log_probs, 7), [1, 3, 6, 7])
    expected = [[-0.1, -2.1, -4.4, -math.inf], [-0.5, -math.inf, -math.inf, -math.inf]]
    torch.testing.assert_close(thresholds, torch.tensor(expected), rtol=0, atol=1e-6)


def test_padding_cannot_be_taken_for_a_node() -> None:
    batch = build_trees(torch.tensor([[[-math.inf, -math.inf]], [[-1.0, -2.0]]]), 3)
    assert batch.num_nodes.tolist() == [0, 2]
    assert batch.child_ranks.tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert batch.parents.tolist() == [[-1, -1, -1], [-1, -1, -1]]
    assert batch.depths.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_an_impossible_block_is_the_root_alone() -> None:
    log_probs = torch.full((3, 2), -math.inf)
    assert len(build_tree(7, log_probs, ids_for(log_probs), 8)) == 1


@pytest.mark.parametrize("values", [[-2.0, -1.0], [-1.0, math.nan], [math.nan, -1.0], [math.nan]])
def test_unsorted_or_nan_log_probs_are_refused(values: list[float]) -> None:
    log_probs = torch.tensor([values])
    with pytest.raises(ValueError, match="NaN or are not sorted"):
        build_tree(7, log_probs, ids_for(log_probs), 4)
    with pytest.raises(ValueError, match="NaN or are not sorted"):
        build_trees(log_probs[None], 4)


@pytest.mark.parametrize("budget", [0, MAX_BUDGET + 1])
def test_budgets_out_of_range_are_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"tree budget {budget} is outside"):
        build_trees(torch.zeros(1, 1, 1), budget)


@pytest.mark.parametrize(("value", "num_nodes"), [(-8191.0, MAX_BUDGET), (-16390.0, 0)])
def test_the_largest_budget_and_the_lowest_scores_fit_the_sort_keys(
    value: float, num_nodes: int
) -> None:
    """The most candidates a depth can have, with sums far below the floor of -8192 nats."""
    log_probs = torch.full((1, 2, MAX_BUDGET), value)
    batch = build_trees(log_probs, MAX_BUDGET)
    tree = build_tree(7, log_probs[0], ids_for(log_probs[0]), MAX_BUDGET)
    assert len(tree) - 1 == batch.num_nodes.item() == num_nodes
    assert torch.equal(tree.parents[1:] - 1, batch.parents[0, :num_nodes])
    assert torch.equal(tree.child_ranks[1:], batch.child_ranks[0, :num_nodes])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ties", "peaked", "flat"])
def test_cuda_builds_the_trees_the_cpu_builds(kind: str) -> None:
    log_probs = random_blocks(64, 128, kind, seed=9)
    expected, found = build_trees(log_probs, 128), build_trees(log_probs.cuda(), 128)
    for name, value in vars(expected).items():
        assert torch.equal(vars(found)[name].cpu(), value)
