"""One softmax over [context ; own block], three ways: structured (CPU), flex (CUDA) and dense (the reference).

B sequences, S context tokens, N anchors, K block size, A query heads, G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drafter.masks import BlockLayout, dense_mask, flex_mask_mod, structured_masks


@dataclass(frozen=True)
class KeysValues:
    """Rotated keys and values, of the context (B, S, G, E) or of the blocks (B, N, K, G, E)."""

    keys: Tensor
    values: Tensor


Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""(queries (B, N, K, A, E), context, blocks) -> (B, N, K, A, E)."""


def make_attend(attention: str, layout: BlockLayout, block_size: int, window: int | None) -> Attend:
    """The attention of one kind of layer over one batch; `auto` is structured on CPU and flex on CUDA."""
    if attention == "auto":
        attention = "flex" if layout.anchor_positions.is_cuda else "structured"
    if attention == "structured":
        context_mask, own_mask = structured_masks(layout, block_size, window)
        both = [context_mask.expand(*own_mask.shape[:-1], -1), own_mask]
        return StructuredAttention(~torch.cat(both, -1)[:, None, :, None])
    if attention == "dense":
        return DenseAttention(dense_mask(layout, block_size, window)[:, None])
    if attention == "flex":
        return FlexAttention(_flex_block_mask(layout, block_size, window))
    raise ValueError(f"attention={attention!r}; choose auto, structured, flex or dense")


@dataclass(frozen=True)
class StructuredAttention:
    """Scores against the context and against the own block only: no part is quadratic in the number of blocks."""

    hidden: Tensor  # (B, 1, N, 1, K, S+K) bool, True where the rule hides the key

    def __call__(self, queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        size, num_anchors, block_size, heads, head_dim = queries.shape
        length, groups = context.keys.shape[1], context.keys.shape[2]
        ratio = heads // groups
        # query heads that share a key head are rows of one matmul, so that no key is repeated
        q = (queries * head_dim**-0.5).view(size, num_anchors, block_size, groups, ratio, head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5).contiguous()  # (B, G, N, A/G, K, E)
        to_context = q.flatten(2, 4) @ context.keys.permute(0, 2, 3, 1)  # (B, G, N*A/G*K, S)
        to_block = q.flatten(3, 4) @ blocks.keys.permute(0, 3, 1, 4, 2)  # (B, G, N, A/G*K, K)
        scores = torch.cat(
            [to_context.view(*q.shape[:-1], length), to_block.view(*q.shape[:-1], block_size)], -1
        )
        scores = scores.float().masked_fill_(self.hidden, -torch.inf)
        weights = scores.softmax(-1).to(q.dtype)  # (B, G, N, A/G, K, S+K)
        on_context, on_block = weights.split([length, block_size], -1)
        mixed = on_context.flatten(2, 4) @ context.values.transpose(1, 2)  # (B, G, N*A/G*K, E)
        own = on_block.flatten(3, 4) @ blocks.values.permute(0, 3, 1, 2, 4)  # (B, G, N, A/G*K, E)
        mixed = mixed.view(q.shape) + own.view(q.shape)
        return mixed.permute(0, 2, 4, 1, 3, 5).reshape(queries.shape)


@dataclass(frozen=True)
class DenseAttention:
    """The reference: every block query against every key, by a mask."""

    mask: Tensor  # (B, 1, N*K, S+N*K) bool

    def __call__(self, queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        q, keys, values = _flatten(queries, context, blocks)
        mixed = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=self.mask, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(queries.shape)


@dataclass(frozen=True)
class FlexAttention:
    """The dense mask as FlexAttention skips it, tile by tile. Forward only on CPU: it has no backward there."""

    mask: BlockMask

    def __call__(self, queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        q, keys, values = _flatten(queries, context, blocks)
        kernel = _compiled_flex() if q.is_cuda else flex_attention
        mixed = kernel(q, keys, values, block_mask=self.mask, enable_gqa=True)
        assert isinstance(mixed, Tensor)
        return mixed.transpose(1, 2).reshape(queries.shape)


@cache
def _compiled_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


def _flex_block_mask(layout: BlockLayout, block_size: int, window: int | None) -> BlockMask:
    size, length = layout.context_positions.shape
    num_queries = layout.anchor_positions.shape[1] * block_size
    device = layout.anchor_positions.device
    return create_block_mask(
        flex_mask_mod(layout, block_size, window),
        size,
        None,
        num_queries,
        length + num_queries,
        device=device.type,
    )


def _flatten(
    queries: Tensor, context: KeysValues, blocks: KeysValues
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, A, N*K, E) queries, (B, G, S+N*K, E) keys and values."""
    keys = torch.cat([context.keys, blocks.keys.flatten(1, 2)], 1)
    values = torch.cat([context.values, blocks.values.flatten(1, 2)], 1)
    return queries.flatten(1, 2).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
