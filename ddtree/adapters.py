"""One adapter a layer type: where a layer keeps what it remembers, what a tree node sees, and how a path is committed.

To transformers an adapter is a cache layer. During verify the nodes' keys and values lie behind the longest row's committed
ones, so a verify pass never touches the committed cache, and dropping the nodes is free. Committing moves the entries of
each row's path down to that row's own end, in place: nothing of the prefix is copied, ever. Places between a short row's
end and the nodes are hidden by the mask.

R rows (sequences), T nodes a row, M entries that move, n prompt tokens of one forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ddtree.nodes import NodeBatch, PathBatch

_SMALLEST_CAPACITY = 256


@dataclass
class Rows:
    """Committed tokens a row, shared by all layers of a target."""

    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)


class LayerAdapter(Protocol):
    """What the verifier asks of a layer."""

    sees_all_committed: bool
    """Whether every node attends to the whole prefix, so that only the nodes need a mask."""

    def visible(self, nodes: NodeBatch) -> Tensor | None:
        """The mask of a verify pass, (R, T, keys) bool; None where the layer needs none."""
        ...

    def visible_in_prompt(self, start: int, count: int, device: torch.device) -> Tensor | None:
        """The mask of prompt tokens start .. start + n - 1, (n, keys) bool."""
        ...

    def row_view(self, row: int) -> CacheLayerMixin | LinearAttentionLayer:
        """An empty cache layer for a new prompt in `row`."""
        ...

    def end_prompt(self, row: int, view: CacheLayerMixin | LinearAttentionLayer) -> None:
        """Take over what the view holds after the prompt."""
        ...

    def commit(self, paths: PathBatch) -> None:
        """Make a path a row of the last verify pass part of what is committed."""
        ...

    def committed(self, row: int) -> list[Tensor]:
        """Views of all that the layer remembers of a row."""
        ...


class FullAttention(CacheLayerMixin):
    """Keys and values in buffers that grow by doubling: (R, heads, capacity, head_dim)."""

    sees_all_committed = True

    def __init__(self, config: PreTrainedConfig, rows: Rows):
        super().__init__()
        self.rows = rows

    def visible(self, nodes: NodeBatch) -> Tensor:
        """(R, T, kept + T) bool over the keys that `update` returns: the row's past, and ancestors or self."""
        past = self._past_positions(nodes)
        is_committed = past < nodes.committed[:, None]  # (R, kept)
        num_rows, num_nodes = nodes.tokens.shape
        return torch.cat(
            [is_committed[:, None].expand(num_rows, num_nodes, -1), nodes.ancestors], dim=2
        )

    def visible_in_prompt(self, start: int, count: int, device: torch.device) -> Tensor:
        """(n, kept + n) bool of prompt tokens start .. start + n - 1 over the keys that `row_view` returns."""
        query = torch.arange(start, start + count, device=device)
        return torch.arange(self.first_kept(start), start + count, device=device) <= query[:, None]

    def row_view(self, row: int) -> CacheLayerMixin:
        """A cache layer of one row that appends for good: for prompts."""
        return _RowView(self, row)

    def end_prompt(self, row: int, view: CacheLayerMixin | LinearAttentionLayer) -> None:
        """Keys and values are already in place."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: put the nodes' (R, heads, T, head_dim) behind all committed ones."""
        start = self.rows.longest
        end = start + key_states.shape[2]
        keys, values = self.buffers(key_states, value_states, end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        first = self.first_kept(min(self.rows.lengths))
        return keys[:, :, first:end], values[:, :, first:end]

    def commit(self, paths: PathBatch) -> None:
        """Move the path's entries to the end of their row's committed ones."""
        if paths.moved.shape[1] == 0:
            return
        for buffer in (self.keys, self.values):
            assert buffer is not None
            row, source, target = paths.on(buffer.device).moved
            if buffer.shape[0] == 1:  # the general form costs three times as much
                buffer.index_copy_(2, target, buffer.index_select(2, source))
            else:
                buffer[row, :, target] = buffer[row, :, source]

    def committed(self, row: int) -> list[Tensor]:
        """Views of a row's committed keys and values, (heads, length, head_dim)."""
        length = self.rows.lengths[row]
        return [
            buffer[row, :, :length] for buffer in (self.keys, self.values) if buffer is not None
        ]

    def first_kept(self, shortest: int) -> int:
        """First committed position that any node may still see, behind `shortest` tokens."""
        return 0

    def buffers(
        self, key_states: Tensor, value_states: Tensor, needed: int
    ) -> tuple[Tensor, Tensor]:
        """The whole buffers, with room for `needed` tokens a row."""
        if self.keys is None or self.values is None or needed > self.keys.shape[2]:
            num_rows = len(self.rows.lengths)
            self.keys = _grown(self.keys, key_states, num_rows, needed)
            self.values = _grown(self.values, value_states, num_rows, needed)
            self.is_initialized = True
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.buffers(key_states, value_states, key_states.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.first_kept(min(self.rows.lengths))
        return self.rows.longest - first + query_length, first

    def get_seq_length(self) -> int:
        return self.rows.longest

    def get_max_length(self) -> int:
        return -1

    def _past_positions(self, nodes: NodeBatch) -> Tensor:
        first, longest = self.first_kept(min(nodes.lengths)), max(nodes.lengths)
        return torch.arange(first, longest, device=nodes.tokens.device)


class SlidingAttention(FullAttention):
    """The same, and a node sees keys at positions > its own - W. Distances count depth, not the index among the nodes."""

    sees_all_committed = False

    def __init__(self, config: PreTrainedConfig, rows: Rows):
        super().__init__(config, rows)
        assert config.sliding_window is not None, "a sliding_attention layer without sliding_window"
        self.window: int = config.sliding_window

    def visible(self, nodes: NodeBatch) -> Tensor:
        past = self._past_positions(nodes).expand(len(nodes.lengths), -1)
        keys = torch.cat([past, nodes.positions], dim=1)  # (R, kept + T)
        in_window = keys[:, None] > nodes.positions[:, :, None] - self.window
        return super().visible(nodes) & in_window

    def visible_in_prompt(self, start: int, count: int, device: torch.device) -> Tensor:
        query = torch.arange(start, start + count, device=device)[:, None]
        keys = torch.arange(self.first_kept(start), start + count, device=device)
        return super().visible_in_prompt(start, count, device) & (keys > query - self.window)

    def first_kept(self, shortest: int) -> int:
        return max(0, shortest - self.window + 1)  # what the root, the least deep node, may see


class _RowView(CacheLayerMixin):
    """One row of an attention layer during its prompt: every update is committed."""

    def __init__(self, layer: FullAttention, row: int):
        super().__init__()
        self._layer, self._row, self._length = layer, row, 0
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (1, heads, n, head_dim) to the row."""
        first = self._layer.first_kept(self._length)
        end = self._length + key_states.shape[2]
        views = []
        for buffer, states in zip(
            self._layer.buffers(key_states, value_states, end),
            (key_states, value_states),
            strict=True,
        ):
            mine = buffer[self._row : self._row + 1]
            mine[:, :, self._length : end] = states
            views.append(mine[:, :, first:end])
        self._length = end
        return views[0], views[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make: the row's layer holds the buffers."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._layer.first_kept(self._length)
        return self._length - first + query_length, first

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


def _grown(buffer: Tensor | None, states: Tensor, num_rows: int, needed: int) -> Tensor:
    """Zeros where nothing was written: hidden places must be finite, since 0 * NaN is NaN in a masked sum."""
    capacity = _SMALLEST_CAPACITY
    while capacity < needed:
        capacity *= 2
    _, num_heads, _, head_dim = states.shape
    grown = states.new_zeros(num_rows, num_heads, capacity, head_dim)
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown


LAYER_ADAPTERS: dict[str, type[FullAttention]] = {
    "full_attention": FullAttention,
    "sliding_attention": SlidingAttention,
}
"""By the names of transformers' `config.layer_types`."""
