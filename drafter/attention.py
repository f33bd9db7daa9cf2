"""One softmax over [context ; own block]: structured and chunked (CPU), flex (CUDA) and dense (the reference).

B sequences, S context tokens, N anchors, K block size, A query heads, G key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from drafter.masks import BlockLayout, dense_mask, structured_masks
from drafter.tiles import flex_block_mask

MAX_SCORES = 2**19
"""Scores a head at once: with 32 heads 64 MiB in float32."""
CHUNK_SCORES = 2**17


@dataclass(frozen=True)
class KeysValues:
    """Rotated keys and values, of the context (B, S, G, E) or of the blocks (B, N, K, G, E)."""

    keys: Tensor
    values: Tensor


Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""(queries (B, N, K, A, E), context, blocks) -> (B, N, K, A, E)."""


def make_attend(attention: str, layout: BlockLayout, block_size: int, window: int | None) -> Attend:
    """The attention of one kind of layer over one batch; `auto` is flex on CUDA and structured on CPU.

    structured becomes chunked on a CPU where its scores of one head would exceed MAX_SCORES.
    """
    if attention == "auto":
        attention = "flex" if layout.anchor_positions.is_cuda else "structured"
    if attention == "structured" and _is_large(layout, block_size):
        attention = "chunked"
    if attention == "chunked":
        return ChunkedAttention(layout, block_size, window)
    if attention == "structured":
        return StructuredAttention(_hidden(layout, block_size, window))
    if attention == "dense":
        return DenseAttention(dense_mask(layout, block_size, window)[:, None])
    if attention == "flex":
        return FlexAttention(flex_block_mask(layout, block_size, window))
    raise ValueError(f"attention={attention!r}; choose auto, structured, chunked, flex or dense")


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


class ChunkedAttention:
    """StructuredAttention over a few blocks of one sequence at a time, each with the stretch of context it sees.

    Nothing of the size of blocks times context outlives a chunk: backward makes the scores again, so what is kept is
    linear in blocks and in context. Anchors of a sequence rise, so a chunk's stretch is about half of the context, or the
    window: less work than one softmax over all of it.
    """

    def __init__(self, layout: BlockLayout, block_size: int, window: int | None):
        self.chunks = _chunks(layout, block_size, window)
        self.layout, self.block_size, self.window = layout, block_size, window

    def __call__(self, queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        parts = (context.keys, context.values, blocks.keys, blocks.values)
        mixed = _AttendChunks.apply(self, queries, *parts)
        assert isinstance(mixed, Tensor)
        return mixed

    def attend(self, chunk: Chunk, parts: Sequence[Tensor]) -> Tensor:
        """One chunk's queries, context keys and values, block keys and values to its (1, n, K, A, E)."""
        mask = _hidden(chunk.of(self.layout), self.block_size, self.window)
        queries, context_keys, context_values, block_keys, block_values = parts
        return StructuredAttention(mask)(
            queries, KeysValues(context_keys, context_values), KeysValues(block_keys, block_values)
        )


@dataclass(frozen=True)
class Chunk:
    """Some blocks of one sequence and the stretch of context that holds all they see."""

    sequence: slice
    blocks: slice
    context: slice

    def of(self, layout: BlockLayout) -> BlockLayout:
        return BlockLayout(
            layout.context_positions.expand(len(layout.anchor_positions), -1)[
                self.sequence, self.context
            ],
            layout.context_documents.expand(len(layout.anchor_positions), -1)[
                self.sequence, self.context
            ],
            layout.anchor_positions[self.sequence, self.blocks],
            layout.anchor_documents[self.sequence, self.blocks],
        )

    def slices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of queries, context keys and values, block keys and values."""
        places = (self.blocks, self.context, self.context, self.blocks, self.blocks)
        return [tensor[self.sequence, place] for tensor, place in zip(tensors, places, strict=True)]


class _AttendChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: ChunkedAttention, *parts: Tensor) -> Tensor:
        ctx.attention = attention
        ctx.save_for_backward(*parts)
        mixed = torch.empty_like(parts[0])
        for chunk in attention.chunks:
            mixed[chunk.sequence, chunk.blocks] = attention.attend(chunk, chunk.slices(parts))
        return mixed

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch's stub has one name for all
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        parts: tuple[Tensor, ...] = ctx.saved_tensors
        # many chunks add to the same context: in float32, whatever the drafter computes in
        gradients = [
            torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
            for part in parts
        ]
        for chunk in ctx.attention.chunks:
            own = [part.detach().requires_grad_() for part in chunk.slices(parts)]
            with torch.enable_grad():
                mixed = ctx.attention.attend(chunk, own)
            found = torch.autograd.grad(mixed, own, grad[chunk.sequence, chunk.blocks])
            for total, part in zip(chunk.slices(gradients), found, strict=True):
                total += part
        return None, *(g.to(p.dtype) for g, p in zip(gradients, parts, strict=True))


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


def _hidden(layout: BlockLayout, block_size: int, window: int | None) -> Tensor:
    """(B, 1, N, 1, K, S+K) bool for StructuredAttention."""
    context_mask, own_mask = structured_masks(layout, block_size, window)
    both = [context_mask.expand(*own_mask.shape[:-1], -1), own_mask]
    return ~torch.cat(both, -1)[:, None, :, None]


def _is_large(layout: BlockLayout, block_size: int) -> bool:
    """Whether chunks pay: not for decoding, which drafts one block a sequence."""
    anchors, length = layout.anchor_positions, layout.context_positions.shape[1]
    if anchors.is_cuda or anchors.shape[1] == 1:
        return False
    return anchors.numel() * block_size * (length + block_size) > MAX_SCORES


def _chunks(layout: BlockLayout, block_size: int, window: int | None) -> list[Chunk]:
    size, num_anchors = layout.anchor_positions.shape
    length = layout.context_positions.shape[1]
    step = max(1, CHUNK_SCORES // (block_size * (length + block_size)))
    chunks = []
    for sequence in range(size):
        for start in range(0, num_anchors, step):
            blocks = slice(start, min(start + step, num_anchors))
            whole = Chunk(slice(sequence, sequence + 1), blocks, slice(0, length))
            # slot 0 reaches back as far as any, and all see up to the anchor
            seen = structured_masks(whole.of(layout), 1, window)[0].flatten(0, 2).any(0).nonzero()
            stretch = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
            chunks.append(replace(whole, context=stretch))
    return chunks


@cache
def _compiled_flex() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=True)


def _flatten(
    queries: Tensor, context: KeysValues, blocks: KeysValues
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, A, N*K, E) queries, (B, G, S+N*K, E) keys and values."""
    keys = torch.cat([context.keys, blocks.keys.flatten(1, 2)], 1)
    values = torch.cat([context.values, blocks.values.flatten(1, 2)], 1)
    return queries.flatten(1, 2).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
