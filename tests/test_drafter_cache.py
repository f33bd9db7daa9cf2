"""Drafting over cached context equals the whole forward, however the context arrived."""

import pytest
import torch
from drafter_cases import CONFIGS, TINY, random_inputs, tiny_drafter

from drafter.cache import ContextCache, draft
from drafter.model import BlockLayout

LENGTH = 24
STEPS = {"at once": [24], "one by one": [1] * 24, "unequal": [9, 0, 1, 5, 2, 7]}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_equals_the_forward_after_every_append(name, steps):
    """Windows of 3 and 6 are shorter than the context of up to 24."""
    drafter = tiny_drafter(CONFIGS[name])
    anchors = torch.arange(LENGTH + 1)[None]
    layout = BlockLayout(
        torch.arange(LENGTH)[None],
        torch.zeros(1, LENGTH).long(),
        anchors,
        torch.zeros_like(anchors),
    )
    features, embeddings = random_inputs(TINY, layout)
    wanted = drafter(features, embeddings, layout)[0]  # (LENGTH + 1, K, H)
    cache = ContextCache(drafter, LENGTH)
    torch.testing.assert_close(
        draft(drafter, cache, embeddings[0, 0]), wanted[0], rtol=1e-5, atol=1e-5
    )
    for step in STEPS[steps]:
        cache.append(features[0, cache.length : cache.length + step])
        got = draft(drafter, cache, embeddings[0, cache.length])
        torch.testing.assert_close(got, wanted[cache.length], rtol=1e-5, atol=1e-5)
    assert cache.length == LENGTH


def test_drafting_leaves_the_cache_as_it_was_and_appending_makes_no_new_buffer():
    drafter = tiny_drafter()
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(10, 3, 32, generator=generator)
    block = torch.randn(4, 32, generator=generator)
    cache = ContextCache(drafter, 10)
    cache.append(features[:6])
    first = draft(drafter, cache, block)
    address = cache.layer_context(1)[0].keys.data_ptr()
    assert torch.equal(draft(drafter, cache, block), first)
    cache.append(features[6:])
    assert cache.layer_context(1)[0].keys.data_ptr() == address
    with pytest.raises(AssertionError, match="fewer tokens"):
        cache.append(features[:1])
