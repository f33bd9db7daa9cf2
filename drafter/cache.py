"""Drafting during decoding: context keys and values are kept, so a draft costs one forward of K tokens.

n new context tokens, D taps, K block size, G key-value heads, E head size, H hidden. Equal to `Drafter.forward`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from drafter.attention import KeysValues, make_attend
from drafter.layers import Layer
from drafter.masks import BlockLayout
from drafter.model import Drafter


class ContextCache:
    """Each layer's context keys and values, rotated at their absolute positions, in buffers that are made once."""

    def __init__(self, drafter: Drafter, max_tokens: int):
        self.drafter = drafter
        self.length = 0
        """Context tokens held; the next draft's anchor stands at this position."""
        config = drafter.config
        shape = (1, max_tokens, config.num_key_value_heads, config.head_dim)
        weight = drafter.fc.weight
        self._layers = [
            KeysValues(weight.new_empty(shape), weight.new_empty(shape))
            for _ in range(config.num_layers)
        ]

    @torch.no_grad()
    def append(self, features: Tensor) -> None:
        """Take in the target features of the next tokens, (n, D, H); n may be 0."""
        end = self.length + len(features)
        assert end <= self._layers[0].keys.shape[1], "the cache was made for fewer tokens"
        context = self.drafter.project_features(features[None])  # (1, n, H)
        rotate = self.drafter.rotation(self._positions(self.length, end))
        for layer, held in zip(self.drafter.layers, self._layers, strict=True):
            new = cast(Layer, layer).self_attn.keys_values(context, rotate)
            held.keys[:, self.length : end] = new.keys
            held.values[:, self.length : end] = new.values
        self.length = end

    def layer_context(self, layer: int) -> tuple[KeysValues, Tensor]:
        """What a draft of this layer may see, and its positions (1, n): a sliding layer needs only its window's tokens."""
        window = self.drafter.config.window(layer)
        start = 0 if window is None else max(0, self.length - (window - 1))
        held = self._layers[layer]
        part = KeysValues(held.keys[:, start : self.length], held.values[:, start : self.length])
        return part, self._positions(start, self.length)

    def _positions(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._layers[0].keys.device)[None]


@torch.no_grad()
def draft(drafter: Drafter, cache: ContextCache, embeddings: Tensor) -> Tensor:
    """Hidden states (K, H) of one block whose anchor stands at `cache.length`; embeddings: (K, H)."""
    anchor = torch.full((1, 1), cache.length, device=embeddings.device)
    slots = anchor[..., None] + torch.arange(len(embeddings), device=embeddings.device)
    rotate = drafter.rotation(slots)
    x = embeddings[None, None].to(drafter.fc.weight.dtype)  # (1, 1, K, H)
    for index, layer in enumerate(drafter.layers):
        context, positions = cache.layer_context(index)
        layout = BlockLayout(positions, torch.zeros_like(positions), anchor, anchor * 0)
        attend = make_attend("structured", layout, len(embeddings), drafter.config.window(index))
        x = cast(Layer, layer).over(x, context, rotate, attend)
    return drafter.norm(x)[0, 0]
