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
    length = 0
    for step in [0, *STEPS[steps]]:
        cache.append([features[0, length : length + step]])
        length += step
        got = draft(drafter, cache, embeddings[0, length][None])
        torch.testing.assert_close(got[0], wanted[length], rtol=1e-5, atol=1e-5)
    assert cache.lengths == [LENGTH]


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_rows_draft_what_each_would_alone(name):
    """Rows grow at their own pace, one is idle, one starts anew in what another sequence left behind."""
    drafter = tiny_drafter(CONFIGS[name])
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(4, 20, 3, 32, generator=generator)
    blocks = torch.randn(3, 4, 32, generator=generator)
    cache = ContextCache(drafter, 20, num_sequences=3)
    cache.append([features[0, :9], features[1, :17], None])
    cache.append([features[0, 9:11], None, features[2, :1]])
    cache.start(1)
    cache.append([features[0, 11:11], features[3, :5], features[2, 1:6]])
    contexts = [features[0, :11], features[3, :5], features[2, :6]]
    assert cache.lengths == [11, 5, 6]
    together = draft(drafter, cache, blocks)
    for row, context in enumerate(contexts):
        alone = ContextCache(drafter, 20)
        alone.append([context])
        wanted = draft(drafter, alone, blocks[row : row + 1])[0]
        torch.testing.assert_close(together[row], wanted, rtol=1e-5, atol=1e-5)


def test_drafting_leaves_the_cache_as_it_was_and_appending_makes_no_new_buffer():
    drafter = tiny_drafter()
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(10, 3, 32, generator=generator)
    block = torch.randn(1, 4, 32, generator=generator)
    cache = ContextCache(drafter, 10)
    cache.append([features[:6]])
    first = draft(drafter, cache, block)
    address = cache.visible(1, 0).keys.data_ptr()
    assert torch.equal(draft(drafter, cache, block), first)
    cache.append([features[6:]])
    assert cache.visible(1, 0).keys.data_ptr() == address
    with pytest.raises(AssertionError, match="fewer tokens"):
        cache.append([features[:1]])
