"""Which tiles of the attention FlexAttention may skip, from the blocks instead of from every query and key.

torch's create_block_mask evaluates the rule for all N*K x (S + N*K) pairs; here one row a block is enough, because slots of a
block see the same context but for the window's lower end, where slot 0 reaches furthest back and slot K-1 least.

B sequences, S context tokens, N anchors, K block size; T tiles of 128 queries, U tiles of 128 keys [context ; all blocks].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from drafter.masks import BlockLayout, flex_mask_mod, structured_masks

TILE = 128


def flex_block_mask(layout: BlockLayout, block_size: int, window: int | None) -> BlockMask:
    """The rule as FlexAttention wants it: tiles to skip, tiles to compute whole, tiles to mask element by element."""
    some, every = tile_visibility(layout, block_size, window)
    partial, whole = (_ordered(tiles[:, None]) for tiles in (some & ~every, every))
    num_queries = layout.anchor_positions.shape[1] * block_size
    return BlockMask.from_kv_blocks(
        *partial,
        *whole,
        BLOCK_SIZE=TILE,
        mask_mod=flex_mask_mod(layout, block_size, window),
        seq_lengths=(num_queries, layout.context_positions.shape[1] + num_queries),
    )


def tile_visibility(
    layout: BlockLayout, block_size: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """(B, T, U) bool twice: tiles in which some query may see some key, and in which every query sees every key.

    The first may hold a tile too many where a block straddles two tiles, the second never does.
    """
    num_anchors = layout.anchor_positions.shape[1]
    reach = [_context_seen(layout, slot, window) for slot in (0, block_size - 1)]  # (B, N, S)
    first, last = _blocks_of_tiles(num_anchors, block_size, reach[0].device)  # (T,)
    some = _count(reach[0], first, last) > 0
    every = _count(reach[0] & reach[1], first, last) == (last - first + 1)[:, None]
    every[:, num_anchors * block_size // TILE :] = False  # a ragged last tile, as torch has it
    key_block = torch.arange(num_anchors * block_size, device=first.device) // block_size
    own = (key_block >= first[:, None]) & (key_block <= last[:, None])  # (T, N*K)
    own = own.expand(len(some), -1, -1)
    # own blocks lie on the diagonal: no tile of them is whole
    return (
        _key_tiles(torch.cat([some, own], -1)).any(-1),
        _key_tiles(torch.cat([every, torch.zeros_like(own)], -1)).all(-1),
    )


def _context_seen(layout: BlockLayout, slot: int, window: int | None) -> Tensor:
    """(B, N, S) bool: context that slot `slot` of each block sees."""
    seen = structured_masks(layout, slot + 1, window)[0]
    return seen[:, :, -1].expand(len(layout.anchor_positions), -1, -1)


def _blocks_of_tiles(
    num_anchors: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(T,) first and last block with a query in each tile."""
    num_queries = num_anchors * block_size
    starts = torch.arange(0, num_queries, TILE, device=device)
    ends = (starts + TILE).clamp(max=num_queries) - 1
    return starts // block_size, ends // block_size


def _count(seen: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """(B, T, S): blocks first..last of each tile that see a context token; seen (B, N, S)."""
    total = pad(seen.int().cumsum(1, dtype=torch.int32), (0, 0, 1, 0))  # (B, N+1, S)
    return total[:, last + 1] - total[:, first]


def _key_tiles(visible: Tensor) -> Tensor:
    """(B, T, keys) -> (B, T, U, 128), ragged ends invisible."""
    missing = -visible.shape[-1] % TILE
    return pad(visible, (0, missing)).unflatten(-1, (-1, TILE))


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and indices of the tiles set in (B, 1, T, U), those set first."""
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return tiles.sum(-1, dtype=torch.int32), indices
