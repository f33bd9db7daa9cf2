"""Drafting during decoding: context keys and values are kept, so a draft costs one forward of K tokens a row.

Rows are sequences of their own lengths, decoded together; a row may start anew while the others go on.
R rows, n new context tokens of a row, S context tokens in sight, D taps, K block size, G key-value heads, E head size,
H hidden. Equal to `Drafter.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from drafter.attention import Attend, KeysValues, make_attend
from drafter.layers import Layer
from drafter.masks import BlockLayout
from drafter.model import Drafter


class ContextCache:
    """Each layer's context keys and values, rotated at their absolute positions, in buffers that are made once."""

    def __init__(self, drafter: Drafter, max_tokens: int, num_sequences: int = 1):
        self.drafter = drafter
        self.lengths = [0] * num_sequences
        """Context tokens a row; the next draft's anchor stands at this position."""
        config, weight = drafter.config, drafter.fc.weight
        # a head's tokens lie together, as the matmuls over them want: no draft copies the context
        shape = (num_sequences, config.num_key_value_heads, max_tokens, config.head_dim)
        # zeros: what a shorter row does not have is hidden by a weight of 0, which a NaN would survive
        self._layers = [
            KeysValues(weight.new_zeros(shape), weight.new_zeros(shape))
            for _ in range(config.num_layers)
        ]

    def start(self, row: int) -> None:
        """Forget the row's context: a new sequence begins there."""
        self.lengths[row] = 0

    @torch.no_grad()
    def append(self, row_features: Sequence[Tensor | None]) -> None:
        """Take in the target features (n, D, H) of each row's next tokens; n may be 0, None leaves a row alone."""
        assert len(row_features) == len(self.lengths), "give one tensor a row, None for an idle one"
        given = [(row, part) for row, part in enumerate(row_features) if part is not None]
        if not sum(len(part) for _, part in given):
            return
        rows, positions = self._places([(row, len(part)) for row, part in given])
        features = torch.cat([part for _, part in given])  # rows one after the other
        context = self.drafter.project_features(features[None])  # (1, n, H)
        rotate = self.drafter.rotation(positions[None])
        for layer, held in zip(self.drafter.layers, self._layers, strict=True):
            new = cast(Layer, layer).self_attn.keys_values(context, rotate)
            held.keys[rows, :, positions] = new.keys[0]
            held.values[rows, :, positions] = new.values[0]
        for row, part in given:
            self.lengths[row] += len(part)

    def seek(self, row: int, length: int) -> None:
        """Draft the row's next block from the anchor at `length`; what was appended from there on is kept, out of sight.

        Then a known sequence is appended once, and drafted from anywhere in it.
        """
        self.lengths[row] = length

    def visible(self, layer: int, start: int) -> KeysValues:
        """The layer's buffers from `start` to the longest row's end, (R, S, G, E): views."""
        held, end = self._layers[layer], max(self.lengths)
        seen = [kept[:, :, start:end].transpose(1, 2) for kept in (held.keys, held.values)]
        return KeysValues(*seen)

    def first_seen(self, window: int | None) -> int:
        """The first position that a draft of any row may see in a layer of this window."""
        return 0 if window is None else max(0, min(self.lengths) - (window - 1))

    def _places(self, counts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Row and position of every new token, both (n,), in one transfer."""
        places = [
            (row, position)
            for row, count in counts
            for position in range(self.lengths[row], self.lengths[row] + count)
        ]
        size, last = self._layers[0].keys.shape[2], max(position for _, position in places)
        assert last < size, f"the cache was made for fewer tokens than {last + 1}"
        rows, positions = torch.tensor(places).T.contiguous().to(self._layers[0].keys.device)
        return rows, positions


@torch.no_grad()
def draft(drafter: Drafter, cache: ContextCache, embeddings: Tensor) -> Tensor:
    """Hidden states (R, K, H) of one block a row, whose anchor stands at the row's length; embeddings: (R, K, H)."""
    block_size, device = embeddings.shape[1], embeddings.device
    anchors = torch.tensor(cache.lengths, device=device)[:, None]  # (R, 1)
    rotate = drafter.rotation(anchors[..., None] + torch.arange(block_size, device=device))
    attends = {
        window: _make_attend(cache, anchors, block_size, window)
        for window in dict.fromkeys(drafter.windows)
    }
    x = embeddings[:, None].to(drafter.fc.weight.dtype)  # (R, 1, K, H)
    for index, (layer, window) in enumerate(zip(drafter.layers, drafter.windows, strict=True)):
        context = cache.visible(index, cache.first_seen(window))
        x = cast(Layer, layer).over(x, context, rotate, attends[window])
    return drafter.norm(x)[:, 0]


def _make_attend(
    cache: ContextCache, anchors: Tensor, block_size: int, window: int | None
) -> Attend:
    """Attention of one kind of layer; what lies beyond a row's own length is not before its anchor, and so hidden."""
    start, end = cache.first_seen(window), max(cache.lengths)
    positions = torch.arange(start, end, device=anchors.device).expand(len(anchors), -1)
    layout = BlockLayout(positions, torch.zeros_like(positions), anchors, torch.zeros_like(anchors))
    return make_attend("structured", layout, block_size, window)
