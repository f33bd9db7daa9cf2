"""Tiles for FlexAttention: nothing visible is skipped, nothing hidden is computed whole, as torch's own pass over all pairs finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from drafter.attention import DenseAttention, FlexAttention, KeysValues
from drafter.masks import BlockLayout, dense_mask
from drafter.tiles import TILE, flex_block_mask, tile_visibility


def packed(lengths: list[int], num_padding: int, num_anchors: int, seed: int) -> BlockLayout:
    """A row of documents and padding; anchors at random places in order, the last a padding block."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(n) for n in [*lengths, num_padding]])
    documents = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((num_padding,), -1)]
    )
    places = torch.randperm(sum(lengths), generator=generator)[:num_anchors].sort().values
    anchor_documents = documents[places]
    anchor_documents[-1] = -1
    return BlockLayout(
        positions[None], documents[None], positions[places][None], anchor_documents[None]
    )


def dense_tiles(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Some and every of 128 x 128 tiles of (B, queries, keys)."""
    ragged = pad(mask, (0, -mask.shape[2] % TILE, 0, -mask.shape[1] % TILE))
    tiles = ragged.unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE))
    return tiles.any(4).any(2), tiles.all(4).all(2)


LAYOUTS = [
    packed([300, 100, 250], 50, 40, 0),
    packed([700], 0, 30, 1),
    packed([5, 3, 128, 256], 120, 33, 2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 20, 150, 400])
@pytest.mark.parametrize("block_size", [4, 6, 16])
def test_tiles_are_those_of_the_dense_mask(
    layout: BlockLayout, window: int | None, block_size: int
) -> None:
    some, every = tile_visibility(layout, block_size, window)
    wanted_some, wanted_every = dense_tiles(dense_mask(layout, block_size, window))
    assert not (wanted_some & ~some).any()  # nothing visible is skipped
    assert not (every & ~wanted_every).any()  # nothing hidden is computed whole
    if TILE % block_size == 0:  # no block straddles two tiles
        assert torch.equal(some, wanted_some)
        assert torch.equal(every, wanted_every)
    if window is None and layout is LAYOUTS[1] and block_size == 16:
        assert every.any()  # a long document has whole tiles
        assert not some.all()  # and some to skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "block_size"), [(None, 16), (150, 6)])
def test_flex_attention_over_many_tiles_is_the_dense_one(
    layout: BlockLayout, window: int | None, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    size, num_anchors = layout.context_positions.shape[1], layout.anchor_positions.shape[1]
    queries = torch.randn(1, num_anchors, block_size, 4, 16, generator=generator)
    context, blocks = (
        KeysValues(*torch.randn(2, *shape, 2, 16, generator=generator))
        for shape in ((1, size), (1, num_anchors, block_size))
    )
    wanted = DenseAttention(dense_mask(layout, block_size, window)[:, None])(
        queries, context, blocks
    )
    mask = flex_block_mask(layout, block_size, window)
    found = FlexAttention(mask)(queries, context, blocks)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
