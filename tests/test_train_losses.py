"""Every loss against its formula written out, by hand, by autograd, and through the chunked head against full logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import LOSS_NAMES, LossName, TrainSection
from data.soft_labels import SoftLabels
from drafter.masks import BlockLayout
from train.batches import MicroBatch
from train.losses import (
    LossMix,
    SoftStatistics,
    auf_weights,
    ce_weights,
    chain_weights,
    coverage,
    default_gamma,
    dpace_weights,
    kl,
    lk,
    sharpened,
    soft_cross_entropy,
    surrogate_weights,
    tree_live_weights,
    tree_weights,
    tv,
)
from train.objective import BatchSums, micro_batch_loss
from train.schedule import LossPhase, is_settled, surrogate_nats


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


@given(seed=st.integers(0, 10_000), power=st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=40, deadline=None)
def test_with_walk_power_1_it_is_the_gradient_of_the_logarithm(seed: int, power: float) -> None:
    """Of (1 + A)^(1-power) / (1-power), and of log(1 + A) for 1."""
    log_probs, mask = random_slots(seed, 3, 5)
    log_probs = log_probs.double().requires_grad_()
    chain = ((log_probs * mask).cumsum(1).exp() * mask).sum(1)
    objective = (1 + chain).log() if power == 1 else (1 + chain) ** (1 - power) / (1 - power)
    (wanted,) = torch.autograd.grad(objective.sum(), log_probs)
    torch.testing.assert_close(chain_weights(log_probs, mask, power), wanted)


@given(seed=st.integers(0, 10_000), nats=st.sampled_from([0.5, 1.5, 4.0]))
@settings(max_examples=40, deadline=None)
def test_with_walk_power_1_a_tree_block_starts_at_1_and_falls(seed: int, nats: float) -> None:
    log_probs, mask = random_slots(seed, 4, 6)
    thresholds = torch.tensor([-0.5, -3.0, -9.0, -math.inf])
    weights = tree_weights(log_probs, mask, thresholds, nats, power=1.0)
    torch.testing.assert_close(weights[:, 0], torch.ones(4))
    assert (weights.diff(dim=1) <= 1e-6).all()
    assert not weights[~mask].any()


def test_only_the_derived_losses_are_discounted_by_themselves() -> None:
    train = TrainSection(steps=1, loss=dict.fromkeys(LOSS_NAMES, 1.0))
    published, derived = ("dpace", "auf", "chain"), ("tree", "tree_live", "tree_surrogate")
    assert train.walk_powers == dict.fromkeys(published, 0.0) | dict.fromkeys(derived, 1.0)
    asked = TrainSection(steps=1, loss="dpace", walk_power=0.5)
    assert asked.walk_powers == {"dpace": 0.5}


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
    assert not surrogate_weights(log_probs, mask, torch.full((2, 3), -3.0), 1.5).requires_grad


def test_auf_stops_at_the_first_label_that_is_not_the_first_choice() -> None:
    is_first = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4, [True] * 4])
    mask = torch.arange(4) < torch.tensor([[4], [4], [4], [2]])
    wanted = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert auf_weights(is_first, mask).tolist() == wanted


def test_tree_live_by_hand() -> None:
    """Slot by slot: certain (0.1), live (1), the breaker (1), nothing behind it; each slot sums what comes, plus 0.02."""
    in_tree = torch.tensor([[True, True, False, False], [True] * 4, [False] * 4])
    is_first = torch.tensor([[True, False, True, True], [True] * 4, [True, False, False, False]])
    mask = torch.ones(3, 4, dtype=torch.bool)
    found = tree_live_weights(in_tree, is_first, mask)
    wanted = [[2.12, 2.02, 1.02, 0.02], [0.42, 0.32, 0.22, 0.12], [1.02, 0.02, 0.02, 0.02]]
    torch.testing.assert_close(found, torch.tensor(wanted))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_tree_live_with_one_child_is_auf(seed: int) -> None:
    """One child a depth: the tree is the chain, so what is kept is all-argmax. Fully accepted blocks aside."""
    generator = torch.Generator().manual_seed(seed)
    _, mask = random_slots(seed, 8, 5)
    is_first = torch.rand(8, 5, generator=generator) < 0.7
    in_tree = (is_first & mask).cumprod(1).bool()
    broken = ~(is_first | ~mask).all(1)
    found = tree_live_weights(in_tree, is_first, mask, certain=0.0, floor=0.0)
    assert torch.equal(found[broken], auf_weights(is_first, mask)[broken])


@given(seed=st.integers(0, 10_000), num_slots=st.integers(1, 6), nats=st.sampled_from([0.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_chain_and_surrogate_weights_are_their_objectives_gradients(
    seed: int, num_slots: int, nats: float
) -> None:
    log_probs, mask = random_slots(seed, 3, num_slots)
    log_probs = log_probs.double().requires_grad_()
    prefix = (log_probs * mask).cumsum(1)
    (wanted,) = torch.autograd.grad((prefix.exp() * mask).sum(), log_probs)
    torch.testing.assert_close(chain_weights(log_probs, mask), wanted)
    thresholds = torch.tensor([[-1.0, -4.0], [-2.0, -3.0], [-5.0, -math.inf]]).double()
    prefix = (log_probs * mask).cumsum(1)
    inside = torch.sigmoid((prefix[..., None] - thresholds[:, None]) / nats).mean(-1) * mask
    (wanted,) = torch.autograd.grad(4 / num_slots * inside.sum(), log_probs)
    torch.testing.assert_close(surrogate_weights(log_probs, mask, thresholds, nats), wanted)


def soft_statistics(
    seed: int, num_blocks: int, num_slots: int, kept: int
) -> tuple[SoftStatistics, Tensor, Tensor]:
    """Of two whole distributions over 6 tokens, given too: p and q (N, L, 6)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, num_slots, 6)
    p = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).log_softmax(-1)
    q = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).log_softmax(-1)
    best = p.topk(kept)
    return SoftStatistics(best.values, q.gather(-1, best.indices)), p.exp(), q.exp()


def test_soft_distances_by_hand() -> None:
    """p = 1/2, 1/4 and a tail of 1/4; q = 1/4, 1/2 and a tail of 1/4."""
    soft = SoftStatistics(
        torch.tensor([[[0.5, 0.25]]]).double().log(), torch.tensor([[[0.25, 0.5]]]).double().log()
    )
    ln2 = math.log(2)
    assert kl(soft).item() == pytest.approx(0.25 * ln2)
    assert soft_cross_entropy(soft).item() == pytest.approx(1.0 * ln2 + 0.25 * ln2 + 0.5 * ln2)
    assert tv(soft).item() == pytest.approx(0.25)
    share = math.exp(-3 * 0.75)
    assert lk(soft, 3.0).item() == pytest.approx(share * 0.25 * ln2 + (1 - share) * 0.25)


@given(seed=st.integers(0, 10_000), kept=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_tail_is_one_token_that_holds_the_rest(seed: int, kept: int) -> None:
    soft, p, q = soft_statistics(seed, 2, 3, kept)
    order = p.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p = torch.cat([p[..., :kept], p[..., kept:].sum(-1, keepdim=True)], -1)
    q = torch.cat([q[..., :kept], q[..., kept:].sum(-1, keepdim=True)], -1)
    torch.testing.assert_close(kl(soft), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(tv(soft), 0.5 * (p - q).abs().sum(-1), rtol=1e-5, atol=1e-8)
    same = SoftStatistics(soft.log_probs, soft.log_probs)
    for distance in (kl(same), tv(same), lk(same, 3.0)):
        torch.testing.assert_close(distance, torch.zeros_like(distance), atol=1e-9, rtol=0)


@given(seed=st.integers(0, 10_000), kept=st.integers(1, 6), power=st.sampled_from([1.0, 1.5, 4.0]))
@settings(max_examples=60, deadline=None)
def test_sharpening_is_the_lower_temperature_but_for_a_bound_on_the_tail(
    seed: int, kept: int, power: float
) -> None:
    soft, p, _ = soft_statistics(seed, 2, 3, kept)
    found = sharpened(soft.target_log_probs, power).exp()
    exact = p**power / (p**power).sum(-1, keepdim=True)
    exact = exact.topk(kept).values
    if power == 1 or kept == 6:  # no tail, up to what float32 tells from none
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    # the tail is never taken for less than it is, nor for more than that many of the last token kept
    assert (found <= exact * (1 + 1e-9)).all()
    tail = (1 - soft.target_log_probs.exp().sum(-1)).clamp(min=1e-6)
    most = tail * soft.target_log_probs[..., -1].exp() ** (power - 1)
    total = (soft.target_log_probs.exp() ** power).sum(-1) + most
    torch.testing.assert_close(found.sum(-1), 1 - most / total)


def test_soft_distances_survive_a_target_and_a_drafter_that_are_certain() -> None:
    certain = torch.tensor([[[0.0, -100.0]]])
    log_probs = certain.clone().requires_grad_()
    for distance in (kl, tv, soft_cross_entropy, lambda soft: lk(soft, 3.0)):
        value = distance(SoftStatistics(certain, log_probs)).sum()
        (gradient,) = torch.autograd.grad(value, log_probs)
        assert value.abs() < 1e-4
        assert gradient.isfinite().all()


@given(seed=st.integers(0, 10_000), nats=st.sampled_from([0.5, 2.0]))
@settings(max_examples=40, deadline=None)
def test_coverage_has_its_objectives_gradient(seed: int, nats: float) -> None:
    soft, _, _ = soft_statistics(seed, 3, 4, 3)
    gold, mask = random_slots(seed, 3, 4)
    gold, own = gold.double().requires_grad_(), soft.log_probs.clone().requires_grad_()
    thresholds = torch.tensor([[-1.0, -4.0], [-2.0, -3.0], [-5.0, -math.inf]]).double()
    objective = torch.zeros((), dtype=torch.float64)
    for n, k, v, b in itertools.product(range(3), range(4), range(3), range(2)):
        if mask[n, k]:
            margin = gold[n, :k].sum() + own[n, k, v] - thresholds[n, b]
            p = soft.target_log_probs[n, k, v].exp()
            objective = objective - 4 / 4 * p * torch.sigmoid(margin / nats) / 2
    wanted = torch.autograd.grad(objective, [gold, own])
    found = coverage(gold, mask, SoftStatistics(soft.target_log_probs, own), thresholds, nats)
    gradients = torch.autograd.grad(found.terms.sum(), [gold, own])
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other)
    torch.testing.assert_close(found.weights, -(wanted[0] + wanted[1].sum(-1)))


def threshold_by_enumeration(log_probs: Tensor, budget: int) -> float:
    """Score of the budget-th best of ALL prefixes of a block; log_probs: (L, V)."""
    num_slots, size = log_probs.shape
    scores = [
        sum(log_probs[slot, token].item() for slot, token in enumerate(path))
        for depth in range(1, num_slots + 1)
        for path in itertools.product(range(size), repeat=depth)
    ]
    return sorted(scores, reverse=True)[budget - 1] if budget <= len(scores) else -math.inf


KEPT = 3


def random_batch(seed: int = 0) -> tuple[MicroBatch, Tensor, Tensor]:
    """2 documents of 3 blocks of 4 (one of them padding), 6 tokens; hidden (2, 3, 4, 5) and head (6, 5) in float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    head = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[3, 1, 0], [2, 3, 3]])
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    target = torch.randn(2, 3, 3, 6, generator=generator).double().log_softmax(-1).topk(KEPT)
    batch = MicroBatch(
        features=torch.zeros(2, 1, 1, 5),
        layout=BlockLayout(zeros[:, :1], zeros[:, :1], zeros, zeros),
        anchor_tokens=zeros,
        labels=torch.randint(0, 6, (2, 3, 3), generator=generator),
        label_mask=torch.arange(3) < lengths[..., None],
        sample_ids=("a", "b"),
        num_tokens=9,
        soft=SoftLabels(target.indices, target.values),
    )
    return batch, hidden, head


NATS, SURROGATE_NATS, GAMMA, ALPHA, ETA = 1.5, 0.8, 2.0, 0.5, 3.0


def reference_loss(
    name: LossName,
    every: Tensor,
    batch: MicroBatch,
    at: tuple[int, int],
    budgets: list[int],
    soft_share: float,
    power: float = 0.0,
) -> Tensor:
    """The loss of one block as its paper writes it, over (1 + A)^power; every: (L, V) log-probs, differentiable."""
    labels, last = batch.labels[at], int(batch.label_mask[at].sum())
    assert batch.soft is not None
    ids, p = batch.soft.token_ids[at], batch.soft.log_probs[at].double().exp()  # (L, P)
    gold = every.gather(1, labels[:, None])[:, 0]
    prefix, detached = gold.cumsum(0), gold.detach()
    first = (every.argmax(-1) == labels).tolist()
    thetas = [threshold_by_enumeration(every.detach(), budget) for budget in budgets]
    theta = float(torch.tensor(thetas[0]))  # float32, as the tree's scores are
    own = every.gather(1, ids)
    tail_p = (1 - p.sum(-1)).clamp(min=1e-6)
    tail_q = 1 - own.exp().sum(-1)
    soft_ce = -(p * own).sum(-1) - tail_p * tail_q.log()
    ce = (1 - soft_share) * -gold + soft_share * soft_ce
    decay = torch.exp(-torch.arange(3).float() / GAMMA)
    inside = [float(prefix[k].detach()) >= thetas[0] - 1e-9 for k in range(3)]
    weights = [0.0] * 3
    expected = 0.0  # A
    if name == "chain" and soft_share == 0:
        reward = prefix[:last].exp().sum()
        return -reward / (1 + float(reward.detach())) ** power
    if name == "tree_surrogate":
        hard = soft = torch.zeros((), dtype=torch.float64)
        for k, bound in itertools.product(range(last), thetas):
            hard = hard + torch.sigmoid((prefix[k] - bound) / SURROGATE_NATS) / len(thetas)
            before = prefix[k] - gold[k]
            covered = p[k] * torch.sigmoid((before + own[k] - bound) / SURROGATE_NATS)
            soft = soft + covered.sum() / len(thetas)
        parts = [part / (1 + float(part.detach())) ** power for part in (hard, soft)]
        return -4 / 3 * ((1 - soft_share) * parts[0] + soft_share * parts[1])
    if name in ("kl", "tv", "lk"):
        entropy = (p * p.log()).sum(-1) + tail_p * tail_p.log()
        total_variation = 0.5 * ((p - own.exp()).abs().sum(-1) + (tail_p - tail_q).abs())
        share = torch.exp(-ETA * (1 - total_variation.detach()))
        lk_loss = share * (soft_ce + entropy) + (1 - share) * total_variation
        distance = {"kl": soft_ce + entropy, "tv": total_variation, "lk": lk_loss}[name]
        return (decay * distance)[:last].sum()
    for j in range(last):
        if name == "ce":
            weights[j] = float(decay[j])
        if name == "auf":
            weights[j] = float(all(first[:j]))
            expected += float(all(first[: j + 1]))
        if name in ("dpace", "chain"):
            alpha = ALPHA if name == "dpace" else 0.0
            q = [(1 - alpha) * math.exp(x) + alpha for x in detached.tolist()]
            weights[j] = sum(math.prod(q[: m + 1]) for m in range(j, last))
            expected += math.prod(q[: j + 1])
        if name == "tree":
            s = [1.0] + [
                1 / (1 + math.exp(-(float(prefix[k]) - theta) / NATS)) for k in range(last)
            ]
            weights[j] = s[j] + sum(s[j + 1 :])
            expected += s[j + 1]
        if name == "tree_live":
            weights[j] = 0.02
            expected += float(inside[j])
            for k in range(j, last):
                if inside[k]:
                    weights[j] += 0.1 if all(first[: k + 1]) else 1.0
                else:
                    weights[j] += float(all(inside[:k]))
    return (torch.tensor(weights).double() * ce)[:last].sum() / (1 + expected) ** power


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize(
    ("share", "soft_share", "power"),
    [
        (0.4, 0.0, 0.0),
        (1.0, 0.0, 0.0),
        (1.0, 0.3, 0.0),
        (1.0, 1.0, 0.0),
        (1.0, 0.0, 1.0),
        (1.0, 0.3, 2.0),
    ],
)
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("budgets", [(7, 2, 7), (1, 1, 5)])
def test_gradient_of_every_loss_is_that_of_full_logits(
    name: LossName,
    share: float,
    soft_share: float,
    power: float,
    chunk_rows: int,
    budgets: tuple[int, ...],
) -> None:
    batch, hidden, head = random_batch()
    mix = LossMix(
        {name: 1.0},
        GAMMA,
        soft_share,
        ALPHA,
        budgets[0],
        NATS,
        budgets[1:],
        ETA,
        walk_powers={name: power},
    )
    hidden.requires_grad_()
    phase = LossPhase(share, SURROGATE_NATS)
    found, _ = micro_batch_loss(hidden, head, batch, mix, phase, 11.0, chunk_rows)
    found.backward()

    reference = hidden.detach().clone().requires_grad_()
    every = torch.log_softmax(reference @ head.T, -1)[:, :, 1:]  # (2, 3, 3, 6), slot 0 dropped
    total = torch.zeros((), dtype=torch.float64)
    of_surrogate = list(budgets[1:])
    for at in itertools.product(range(2), range(3)):
        trees = of_surrogate if name == "tree_surrogate" else list(budgets[:1])
        own = reference_loss(name, every[at], batch, at, trees, soft_share, power)
        decayed = reference_loss("ce", every[at], batch, at, [1], 0.0)
        total = total + share * own + (1 - share) * decayed
    (total / 11.0).backward()

    assert hidden.grad is not None
    assert reference.grad is not None
    # thresholds are float32: the weights of the tree losses are as exact as that
    atol = 1e-7 if name in ("tree", "tree_surrogate") else 1e-10
    torch.testing.assert_close(hidden.grad, reference.grad, rtol=1e-6, atol=atol)
    assert not hidden.grad[:, :, 0].any()  # slot 0 is never supervised
    if name not in ("chain", "tree_surrogate"):  # these are written with their gradient's weights
        assert found.item() * 11 == pytest.approx(total.item(), rel=1e-6)


@pytest.mark.parametrize("budget", [1, 7])
def test_sums_count_hits_weights_and_what_is_in_the_tree(budget: int) -> None:
    batch, hidden, head = random_batch()
    mix = LossMix(
        {"tree": 1.0}, GAMMA, tree_budget=budget, tree_nats=1.5, walk_powers={"tree": 1.0}
    )
    loss, sums = micro_batch_loss(hidden, head, batch, mix, LossPhase(), 11.0, 1000)
    every = torch.log_softmax(hidden @ head.T, -1)[:, :, 1:]
    weight = tree = chain = 0.0
    for at in itertools.product(range(2), range(3)):
        last = int(batch.label_mask[at].sum())
        gold = every[at].gather(1, batch.labels[at][:, None])[:, 0]
        theta = threshold_by_enumeration(every[at], budget)
        own = tree_weights(gold[None], batch.label_mask[at][None], torch.tensor([theta]), 1.5, 1.0)
        weight += own.sum().item()
        tree += sum(gold[:k].sum().item() >= theta - 1e-9 for k in range(1, last + 1))
        hits = every[at][:last].argmax(-1) == batch.labels[at][:last]
        chain += hits.cumprod(0).sum().item()
    read = BatchSums.of(sums)
    assert read.weight == pytest.approx(weight, rel=1e-5)
    assert read.loss == pytest.approx(loss.item() * 11)
    assert (read.slots, read.blocks, read.chain, read.tokens) == (12, 5, chain, 9)
    assert (read.tree, read.tree_blocks) == (tree, 5)


def test_a_mix_is_the_sum_of_its_losses_with_one_weight_a_slot() -> None:
    batch, hidden, head = random_batch()
    hidden.requires_grad_()

    def gradient(losses: dict[LossName, float]) -> tuple[Tensor, float]:
        mix = LossMix(losses, GAMMA, surrogate_budgets=(4, 7), tree_budget=7)
        loss, sums = micro_batch_loss(hidden, head, batch, mix, LossPhase(), 11.0, 1000)
        return torch.autograd.grad(loss, hidden)[0], BatchSums.of(sums).weight

    parts: dict[LossName, float] = {"tree": 0.5, "kl": 2.0, "tree_surrogate": 0.25, "ce": 1.5}
    found, weight = gradient(parts)
    alone = [(factor, *gradient({name: 1.0})) for name, factor in parts.items()]
    torch.testing.assert_close(found, torch.stack([f * g for f, g, _ in alone]).sum(0))
    assert weight == pytest.approx(sum(f * w for f, _, w in alone))


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    batch, hidden, head = random_batch()
    hidden.requires_grad_()
    mix = LossMix({"tree": 1.0}, GAMMA, tree_budget=7)
    loss, sums = micro_batch_loss(
        hidden, head, batch.without_labels(), mix, LossPhase(), 11.0, 1000
    )
    loss.backward()
    assert loss.item() == 0
    assert not sums.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_the_surrogates_softness_falls_geometrically_from_warmup_to_the_last_step() -> None:
    train = TrainSection(
        steps=101, loss="tree_surrogate", ce_warmup_fraction=0.0, crossfade_fraction=0.0
    )
    assert [surrogate_nats(step, train) for step in (0, 50, 100)] == pytest.approx([2.0, 1.0, 0.5])
    warmed = train.model_copy(update={"steps": 100, "ce_warmup_fraction": 0.5})
    assert surrogate_nats(10, warmed) == surrogate_nats(50, warmed) == 2.0
    assert surrogate_nats(99, warmed) == pytest.approx(0.5)
    # on its way to another last step: such a run is not continued with more steps
    assert not is_settled(50, train)
    assert is_settled(50, train.model_copy(update={"surrogate_temperatures_nats": (1.0, 1.0)}))
    assert is_settled(50, train.model_copy(update={"loss": "tree_live"}))
