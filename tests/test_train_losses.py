"""Slot weights against their formulas written out, and the loss through the chunked head against full logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import LossName
from drafter.masks import BlockLayout
from train.batches import MicroBatch
from train.losses import Weighting, ce_weights, default_gamma, dpace_weights, tree_weights
from train.objective import BatchSums, micro_batch_loss


def random_slots(seed: int, num_blocks: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """log_probs (N, L) and a prefix mask (N, L)."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -3 * torch.rand(num_blocks, num_slots, generator=generator)
    lengths = torch.randint(1, num_slots + 1, (num_blocks, 1), generator=generator)
    return log_probs, torch.arange(num_slots) < lengths


def test_decay_is_the_papers() -> None:
    mask = torch.tensor([[True, True, True, False]])
    found = ce_weights(mask, gamma=4.0)
    wanted = torch.tensor([[1.0, math.exp(-1 / 4), math.exp(-2 / 4), 0.0]])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(4, 4), (8, 4), (9, 4.5), (10, 5), (13, 6), (16, 7), (32, 7)]
)
def test_gamma_between_the_papers_block_sizes(block_size: int, gamma: float) -> None:
    assert default_gamma(block_size) == pytest.approx(gamma)


@given(seed=st.integers(0, 10_000), num_slots=st.integers(1, 7), alpha=st.sampled_from([0, 0.5, 1]))
@settings(max_examples=60, deadline=None)
def test_dpace_is_its_double_sum(seed: int, num_slots: int, alpha: float) -> None:
    log_probs, mask = random_slots(seed, 3, num_slots)
    found = dpace_weights(log_probs, mask, alpha)
    for n in range(3):
        q = [(1 - alpha) * math.exp(x) + alpha for x in log_probs[n].tolist()]
        last = int(mask[n].sum())
        for j in range(num_slots):
            wanted = sum(math.prod(q[: m + 1]) for m in range(j, last)) if j < last else 0.0
            assert found[n, j].item() == pytest.approx(wanted, rel=1e-5)


@given(seed=st.integers(0, 10_000), num_slots=st.integers(1, 7), nats=st.sampled_from([0.5, 1.5]))
@settings(max_examples=60, deadline=None)
def test_tree_weights_are_their_formula(seed: int, num_slots: int, nats: float) -> None:
    log_probs, mask = random_slots(seed, 3, num_slots)
    thresholds = torch.tensor([-1.0, -4.0, -math.inf])
    found = tree_weights(log_probs, mask, thresholds, nats)
    for n in range(3):
        last = int(mask[n].sum())
        survival = [1.0]
        for k in range(1, last + 1):
            margin = sum(log_probs[n, :k].tolist()) - thresholds[n].item()
            survival.append(1 / (1 + math.exp(-margin / nats)))
        for j in range(1, num_slots + 1):
            wanted = survival[j - 1] + sum(survival[j : last + 1]) if j <= last else 0.0
            assert found[n, j - 1].item() == pytest.approx(wanted, rel=1e-5)


def test_hopeless_prefixes_weigh_nothing_and_the_first_slot_always_counts() -> None:
    log_probs = torch.full((1, 4), -60.0)
    mask = torch.ones(1, 4, dtype=torch.bool)
    weights = tree_weights(log_probs, mask, torch.tensor([-5.0]), 1.5)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_weights_carry_no_gradient() -> None:
    log_probs, mask = random_slots(0, 2, 4)
    log_probs.requires_grad_()
    assert not dpace_weights(log_probs, mask, 0.5).requires_grad
    assert not tree_weights(log_probs, mask, torch.tensor([-3.0, -3.0]), 1.5).requires_grad


def threshold_by_enumeration(log_probs: Tensor, budget: int) -> float:
    """Score of the budget-th best of ALL prefixes of a block; log_probs: (L, V)."""
    num_slots, size = log_probs.shape
    scores = [
        sum(log_probs[slot, token].item() for slot, token in enumerate(path))
        for depth in range(1, num_slots + 1)
        for path in itertools.product(range(size), repeat=depth)
    ]
    return sorted(scores, reverse=True)[budget - 1] if budget <= len(scores) else -math.inf


def random_batch(seed: int = 0) -> tuple[MicroBatch, Tensor, Tensor]:
    """2 documents of 3 blocks of 4 (one of them padding), 6 tokens; hidden (2, 3, 4, 5) and head (6, 5) in float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    head = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[3, 1, 0], [2, 3, 3]])
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    batch = MicroBatch(
        features=torch.zeros(2, 1, 1, 5),
        layout=BlockLayout(zeros[:, :1], zeros[:, :1], zeros, zeros),
        anchor_tokens=zeros,
        labels=torch.randint(0, 6, (2, 3, 3), generator=generator),
        label_mask=torch.arange(3) < lengths[..., None],
        sample_ids=("a", "b"),
        num_tokens=9,
    )
    return batch, hidden, head


@pytest.mark.parametrize("loss", ["ce", "dpace", "tree"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("budget", [1, 7])
def test_loss_and_gradient_are_those_of_full_logits(
    loss: LossName, share: float, chunk_rows: int, budget: int
) -> None:
    batch, hidden, head = random_batch()
    weighting = Weighting(loss, gamma=2.0, alpha=0.5, budget=budget, temperature_nats=1.5)
    share = 0.0 if loss == "ce" else share
    hidden.requires_grad_()
    found, sums = micro_batch_loss(hidden, head, batch, weighting, share, 11.0, chunk_rows)
    found.backward()

    reference = hidden.detach().clone().requires_grad_()
    every = torch.log_softmax(reference @ head.T, -1)[:, :, 1:]  # (2, 3, 3, 6), slot 0 dropped
    gold = every.gather(-1, batch.labels[..., None])[..., 0]
    total = torch.zeros((), dtype=torch.float64)
    weight_sum = tree = chain = 0.0
    for b, n in itertools.product(range(2), range(3)):
        mask, own = batch.label_mask[b, n][None], gold[b, n].detach()[None]
        theta = threshold_by_enumeration(every[b, n].detach(), weighting.budget)
        weights = (1 - share) * ce_weights(mask, 2.0)
        if loss == "dpace":
            weights = weights + share * dpace_weights(own, mask, 0.5)
        if loss == "tree":
            weights = weights + share * tree_weights(own, mask, torch.tensor([theta]), 1.5)
        total = total - (weights[0] * gold[b, n]).sum() / 11.0
        weight_sum += weights.sum().item()
        last = int(mask.sum())
        tree += sum(own[0, :k].sum().item() >= theta - 1e-9 for k in range(1, last + 1))
        hits = every[b, n, :last].argmax(-1) == batch.labels[b, n, :last]
        chain += hits.cumprod(0).sum().item()
    total.backward()

    assert found.item() == pytest.approx(total.item(), rel=1e-5)
    assert hidden.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(hidden.grad, reference.grad, rtol=1e-5, atol=1e-8)
    assert not hidden.grad[:, :, 0].any()  # slot 0 is never supervised
    read = BatchSums.of(sums)
    assert read.weight == pytest.approx(weight_sum, rel=1e-5)
    assert read.weighted_ce == pytest.approx(total.item() * 11, rel=1e-5)
    assert (read.slots, read.blocks, read.chain, read.tokens) == (12, 5, chain, 9)
    if loss == "tree" and share > 0:
        assert (read.tree, read.tree_blocks) == (tree, 5)


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    batch, hidden, head = random_batch()
    hidden.requires_grad_()
    weighting = Weighting("tree", 2.0, 0.5, 7, 1.5)
    loss, sums = micro_batch_loss(hidden, head, batch.without_labels(), weighting, 1.0, 11.0, 1000)
    loss.backward()
    assert loss.item() == 0
    assert not sums.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()
