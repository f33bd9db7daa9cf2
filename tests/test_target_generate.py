"""Decoding: a batch equals its rows one by one, a row equals HF's own decoding, sampling follows one rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, HYBRID
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from target.cache import growing_cache
from target.generate import Sampling, choose, generate_batch, sampling_probs
from target.load import Target

MakeTarget = Callable[..., Target]
GREEDY = Sampling()


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts([1, 37, 12, 80, 5, 20, 3, 33])


def without_cache(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy decoding the slow way: the whole text again at every token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_a_greedy_batch_is_each_row_decoded_without_any_cache(
    tiny_target: MakeTarget, family: str
) -> None:
    """Left padding, positions, the growing cache and rows that leave the batch change nothing."""
    target = dataclasses.replace(tiny_target(family), eos_token_ids=())
    slow = [without_cache(target, prompt, 30) for prompt in PROMPTS]
    # end-of-text ids that end most rows early, at different steps
    target = dataclasses.replace(
        target, eos_token_ids=(258, *(row[i] for i, row in enumerate(slow[1:5], 3)))
    )
    slow = [without_cache(target, prompt, 30) for prompt in PROMPTS]
    assert len({len(row) for row in slow}) > 3
    assert generate_batch(target, PROMPTS, 30, GREEDY) == slow


@pytest.mark.parametrize("family", ["qwen3", HYBRID])
def test_a_long_answer_outgrows_the_cache_buffers(tiny_target: MakeTarget, family: str) -> None:
    target = dataclasses.replace(tiny_target(family), eos_token_ids=())
    batch = generate_batch(target, PROMPTS[:2], 80, GREEDY)
    assert batch == [without_cache(target, prompt, 80) for prompt in PROMPTS[:2]]


def test_every_row_ends_with_eos_or_at_the_limit(tiny_target: MakeTarget) -> None:
    target = dataclasses.replace(tiny_target("llama"), eos_token_ids=tuple(range(0, 320, 20)))
    generator = torch.Generator().manual_seed(0)
    responses = generate_batch(target, PROMPTS, 12, Sampling(temperature=1.0), generator)
    assert any(len(r) < 12 for r in responses)
    for response in responses:
        assert 1 <= len(response) <= 12
        assert not set(response[:-1]) & set(target.eos_token_ids)
        assert len(response) == 12 or response[-1] in target.eos_token_ids
    assert [len(r) for r in generate_batch(target, PROMPTS, 1, GREEDY)] == [1] * len(PROMPTS)


def test_the_generator_decides_the_sample(tiny_target: MakeTarget) -> None:
    def sample(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return generate_batch(tiny_target(), PROMPTS, 10, Sampling(temperature=1.0), generator)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_the_growing_cache_reads_as_hfs_cache(tiny_target: MakeTarget) -> None:
    """Over growth, a prefill into a filled cache, and rows taken out."""
    config = tiny_target("qwen3").model.config
    ours, theirs = growing_cache(config), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    batch = 4
    for step, num_tokens in enumerate([5, 1, 70, 1, 1, 200]):
        if step in (2, 4):
            keep = torch.arange(1, batch)
            for layer in [*ours.layers, *theirs.layers]:
                layer.reorder_cache(keep)  # pyright: ignore[reportArgumentType] - HF says LongTensor
            batch -= 1
        new = torch.randn(2, batch, 2, num_tokens, 16, generator=generator)
        for layer in range(6):
            got, wanted = (c.update(new[0] + layer, new[1], layer) for c in (ours, theirs))
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[1], wanted[1])
        assert ours.get_seq_length() == theirs.get_seq_length()


def brute_force(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top-k, renormalise, top-p by mass before a token, renormalise: one row, plain Python, no ties."""
    weights = torch.tensor(logits).double().div(sampling.temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sampling.top_k or None]
    total = sum(weights[i] for i in kept)
    nucleus, before = [], 0.0
    for i in kept:
        if before < sampling.top_p:
            nucleus.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-60, 60), min_size=1, max_size=12, unique=True),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0.13, 0.5, 0.87, 1.0]),
    st.integers(0, 14),
)
def test_sampling_is_top_k_then_top_p(
    tenths: list[int], temperature: float, top_p: float, top_k: int
) -> None:
    sampling = Sampling(temperature, top_p, top_k)
    logits = [t / 10 for t in tenths]
    probs = sampling_probs(torch.tensor([logits, logits]), sampling)
    assert torch.equal(probs[0], probs[1])
    torch.testing.assert_close(
        probs[0].double(),
        torch.tensor(brute_force(logits, sampling)).double(),
        atol=1e-6,
        rtol=1e-5,
    )


def test_hand_made_distribution() -> None:
    """p = 0.5, 0.3, 0.15, 0.05: top_p 0.75 keeps the token that crosses it; top_k goes first."""
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    close = torch.testing.assert_close
    close(sampling_probs(logits, Sampling(1.0, 0.75)), torch.tensor([0, 0.625, 0, 0.375]))
    close(sampling_probs(logits, Sampling(1.0, 0.4)), torch.tensor([0, 1.0, 0, 0]))
    close(sampling_probs(logits, Sampling(1.0, 1.0, 2)), torch.tensor([0, 0.625, 0, 0.375]))
    # after top_k=2 the first token alone holds 0.625 >= 0.6, on all four it holds 0.5
    close(sampling_probs(logits, Sampling(1.0, 0.6, 2)), torch.tensor([0, 1.0, 0, 0]))
    close(sampling_probs(logits, Sampling(0.0)), torch.tensor([0, 1.0, 0, 0]))


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)
    drawn = choose(probs.log().expand(100, 200, 4), Sampling(1.0, top_k=3), generator)
    assert drawn.shape == (100, 200)
    share = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert share[3] == 0
    # five standard deviations of a share over 20,000 draws
    assert ((share - expected).abs() < 5 * (expected * (1 - expected) / 20_000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_first_argmax(dtype: torch.dtype) -> None:
    logits: Tensor = torch.randint(0, 9, (50, 300), generator=torch.Generator().manual_seed(0)).to(
        dtype
    )
    assert torch.equal(choose(logits, GREEDY, None), logits.argmax(-1))
    assert torch.equal(sampling_probs(logits, GREEDY).argmax(-1), logits.argmax(-1))
