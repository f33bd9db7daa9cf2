"""Who sees whom: the one rule, and the masks every attention path derives from it.

B sequences, S context tokens, N anchors (blocks), K block size, W sliding window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Where the context and the blocks of a batch stand. Positions are absolute inside their document."""

    context_positions: Tensor  # (B, S) int64
    context_documents: Tensor  # (B, S) int64, -1 for padding
    anchor_positions: Tensor  # (B, N) int64
    anchor_documents: Tensor  # (B, N) int64, -1 for a padding block


@dataclass(frozen=True)
class Places:
    """Queries or keys as the rule sees them; the tensors broadcast against each other."""

    position: Tensor  # absolute position in the document
    document: Tensor  # -1 for padding
    block: Tensor  # index of the block in its sequence, -1 for a context token
    anchor: Tensor  # position of the block's anchor; of no meaning for a context token


def visible(query: Places, key: Places, window: int | None) -> Tensor:
    """The rule: whether a query of a block sees a key, bool, broadcast over both sides' shapes.

    Context: tokens of the block's own document strictly before its anchor, whose feature does not exist yet at
    inference. Block: slots of the query's own block, all of them in a full layer (`window` None), none after the query
    in a sliding layer. A sliding layer's window reaches back to position - (W-1), for context and block alike.
    Every query sees itself, so no softmax is empty: a padding block sees itself and no context.
    """
    context = (key.block < 0) & (key.document >= 0) & (key.document == query.document)
    own_block = key.block == query.block
    if window is None:
        return (context & (key.position < query.anchor)) | own_block
    own_block = own_block & (key.position <= query.position)
    seen = (context & (key.position < query.anchor)) | own_block
    return seen & (key.position > query.position - window)


def slot_positions(layout: BlockLayout, block_size: int) -> Tensor:
    """(B, N, K): slot k stands at anchor + k."""
    slots = torch.arange(block_size, device=layout.anchor_positions.device)
    return layout.anchor_positions[:, :, None] + slots


def structured_masks(
    layout: BlockLayout, block_size: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """(B, N, K, S) block queries to context, and (B, N, K, K) to their own block; K may be 1 where slots agree."""
    blocks, context = _block_places(layout, block_size), _context_places(layout)
    queries = _map(blocks, lambda x: x[..., None])
    own_keys = _map(blocks, lambda x: x[:, :, None, :])
    context_keys = _map(context, lambda x: x[:, None, None, :])
    return visible(queries, context_keys, window), visible(queries, own_keys, window)


def dense_mask(layout: BlockLayout, block_size: int, window: int | None) -> Tensor:
    """(B, N*K, S+N*K) block queries to [context ; all blocks]."""
    queries, keys = _flat_places(layout, block_size)
    return visible(_map(queries, lambda x: x[:, :, None]), _map(keys, lambda x: x[:, None]), window)


def flex_mask_mod(
    layout: BlockLayout, block_size: int, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's `mask_mod(batch, head, query, key)` over [context ; all blocks]."""
    queries, keys = _flat_places(layout, block_size)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(
            _map(queries, lambda x: x[batch, query]), _map(keys, lambda x: x[batch, key]), window
        )

    return mask_mod


def _map(places: Places, change: Callable[[Tensor], Tensor]) -> Places:
    return Places(
        change(places.position),
        change(places.document),
        change(places.block),
        change(places.anchor),
    )


def _context_places(layout: BlockLayout) -> Places:
    """(B, S)."""
    positions = layout.context_positions
    nothing = torch.full_like(positions[:1], -1)
    return Places(positions, layout.context_documents, nothing, nothing)


def _block_places(layout: BlockLayout, block_size: int) -> Places:
    """(B, N, K), with K = 1 where all slots of a block agree."""
    anchors = layout.anchor_positions
    blocks = torch.arange(anchors.shape[1], device=anchors.device)
    return Places(
        slot_positions(layout, block_size),
        layout.anchor_documents[:, :, None],
        blocks[None, :, None],
        anchors[:, :, None],
    )


def _flat_places(layout: BlockLayout, block_size: int) -> tuple[Places, Places]:
    """Queries (B, N*K) and keys (B, S+N*K)."""
    size, length = layout.context_positions.shape
    shape = (*layout.anchor_positions.shape, block_size)
    queries = _map(_block_places(layout, block_size), lambda x: x.expand(shape).flatten(1))
    context = _map(_context_places(layout), lambda x: x.expand(size, length))
    keys = Places(
        torch.cat([context.position, queries.position], 1),
        torch.cat([context.document, queries.document], 1),
        torch.cat([context.block, queries.block], 1),
        torch.cat([context.anchor, queries.anchor], 1),
    )
    return queries, keys
