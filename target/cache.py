"""A KV cache that grows in place: HF's own copies every key and value at each new token."""

from __future__ import annotations

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_ROOM = 64
"""Tokens a full buffer grows by: the copy of HF's cache, once in 64 steps. It was 7 % of decoding at 100 tokens."""


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """HF's cache of this family, its full-attention layers replaced; sliding and linear layers hold little and stay."""
    cache = DynamicCache(config=config)
    cache.layers = [
        _GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class _GrowingLayer(DynamicLayer):
    """`keys` and `values` (B, heads, S, head_dim) are the filled part of buffers with room for more tokens."""

    _buffers: tuple[Tensor, Tensor]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = key_states[:, :, :0], value_states[:, :, :0]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            keys, values = self._buffers
            self._buffers = _with_room(keys, start, end), _with_room(values, start, end)
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        end = self.get_seq_length()
        if end == 0:
            return  # some families share the keys of another layer
        keys, values = self._buffers
        self._buffers = keys.index_select(0, beam_idx), values.index_select(0, beam_idx)
        self.keys, self.values = self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]


def _with_room(buffer: Tensor, start: int, end: int) -> Tensor:
    batch, heads, _, width = buffer.shape
    larger = buffer.new_empty(batch, heads, end + _ROOM, width)
    larger[:, :, :start] = buffer[:, :, :start]
    return larger
