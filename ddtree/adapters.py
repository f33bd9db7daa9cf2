"""One adapter a layer type: where a layer keeps what it remembers, what a tree node sees, and how a path is committed.

To transformers an adapter is a cache layer. During verify the nodes' keys and values lie beyond the committed length, so a
verify pass never touches the committed cache, and dropping the nodes is free. Committing a path moves its entries down in
place: nothing of the prefix is copied, ever. A new layer type is a class here and an entry in LAYER_ADAPTERS.

T tree nodes with root, P nodes of the accepted path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

_SMALLEST_CAPACITY = 256


@dataclass(frozen=True, eq=False)
class VerifyNodes:
    """What a verify pass puts behind `past` committed tokens."""

    past: int
    depths: Tensor  # (T,) int64; a node's position is past + depth
    ancestors: Tensor  # (T, T) bool, or self


@dataclass(frozen=True, eq=False)
class AcceptedPath:
    """The nodes to commit, root first. The leading ones that already lie where they belong are only counted."""

    num_in_place: int
    moved: Tensor  # (P - num_in_place,) int64 node indices

    @classmethod
    def of(cls, nodes: list[int], device: torch.device) -> AcceptedPath:
        in_place = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        return cls(in_place, torch.tensor(nodes[in_place:], dtype=torch.int64, device=device))


class FullAttention(CacheLayerMixin):
    """Keys and values in a buffer that grows by doubling: (1, heads, capacity, head_dim), `length` of it committed."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.length = 0

    def visible(self, nodes: VerifyNodes) -> Tensor:
        """(T, kept + T) bool over the keys that `update` returns: all of the past, and ancestors or self."""
        kept = nodes.past - self._first_kept()
        past = nodes.ancestors.new_ones(len(nodes.depths), kept)
        return torch.cat([past, nodes.ancestors], dim=1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: put the nodes' (1, heads, T, head_dim) behind the committed ones."""
        end = self.length + key_states.shape[2]
        if not self.is_initialized or end > self._buffers()[0].shape[2]:
            self._grow(key_states, value_states, end)
        keys, values = self._buffers()
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, self._first_kept() : end], values[:, :, self._first_kept() : end]

    def commit(self, path: AcceptedPath) -> None:
        """Move the path's entries to the end of the committed ones, which become longer by it."""
        start = self.length + path.num_in_place
        end = start + path.moved.shape[0]
        if end > start:
            for buffer in self._buffers():
                source = path.moved.to(buffer.device) + self.length
                buffer[:, :, start:end] = buffer.index_select(2, source)
        self.length = end

    def committed(self) -> tuple[Tensor, Tensor]:
        """Views of the committed keys and values, (1, heads, length, head_dim)."""
        keys, values = self._buffers()
        return keys[:, :, : self.length], values[:, :, : self.length]

    def start_sequence(self) -> None:
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._grow(key_states, value_states, key_states.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_kept()
        return self.length - first + query_length, first

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def _first_kept(self) -> int:
        """First committed position that any node may still see."""
        return 0

    def _buffers(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _grow(self, key_states: Tensor, value_states: Tensor, needed: int) -> None:
        capacity = _SMALLEST_CAPACITY
        while capacity < needed:
            capacity *= 2
        grown = [
            states.new_empty(*states.shape[:2], capacity, states.shape[3])
            for states in (key_states, value_states)
        ]
        if self.is_initialized:
            for new, old in zip(grown, self.committed(), strict=True):
                new[:, :, : self.length] = old
        self.keys, self.values = grown
        self.is_initialized = True


class SlidingAttention(FullAttention):
    """The same, and a node sees keys at positions > its own - W. Distances count depth, not the index among the nodes."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        assert config.sliding_window is not None, "a sliding_attention layer without sliding_window"
        self.window: int = config.sliding_window

    def visible(self, nodes: VerifyNodes) -> Tensor:
        query = nodes.past + nodes.depths
        past = torch.arange(self._first_kept(), nodes.past, device=query.device)
        return super().visible(nodes) & (torch.cat([past, query]) > query[:, None] - self.window)

    def _first_kept(self) -> int:
        return max(0, self.length - self.window + 1)  # what the root, the least deep node, may see


LAYER_ADAPTERS: dict[str, type[FullAttention]] = {
    "full_attention": FullAttention,
    "sliding_attention": SlidingAttention,
}
"""By the names of transformers' `config.layer_types`."""
