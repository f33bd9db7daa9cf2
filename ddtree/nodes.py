"""What a verify pass lays behind the committed tokens, and what a commit keeps of it: index tensors, one transfer each.

R rows (sequences), T nodes of the largest tree (or its padded count), A steps of ancestry, P nodes of the longest path,
M cache entries that move, C cached convolution columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.tree import DraftTree

_ANCESTRY_STEP = 8
"""Ancestry is padded to a multiple of this, so that shapes repeat from round to round."""

NODE_COUNTS = (1, 16, 24, 32, 48, 72, 96, 136, 192, 264, 392, 520, 776, 1032)
"""Padded sizes on a GPU: multiples of 8 that hold the usual budgets and a root, at most half of them padding."""


@dataclass(frozen=True, eq=False)
class NodeBatch:
    """The nodes of one tree a row. Padding nodes are children of the root that no node descends from."""

    lengths: tuple[int, ...]
    """Committed tokens a row; a node's position is its row's length + depth."""
    paddings: tuple[int, ...]
    """Nodes of each row that stand for nothing, all at its end; T for an idle row."""
    committed: Tensor  # (R,) int64, `lengths` on the device
    rope_deltas: Tensor  # (R,) int64: what M-RoPE adds to positions after images; 0 for text
    tokens: Tensor  # (R, T) int64
    depths: Tensor  # (R, T) int64
    ancestry: Tensor  # (R, T, A) int64: the node, its parent, ... its root; T beyond the root
    host_parents: NDArray[np.int64]  # (R, T); -1 for roots
    host_depths: NDArray[np.int64]  # (R, T)
    _elsewhere: dict[torch.device, NodeBatch] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        trees: Sequence[DraftTree | None],
        lengths: Sequence[int],
        rope_deltas: Sequence[int],
        num_nodes: int,
        device: torch.device,
    ) -> NodeBatch:
        """One tree a row, None for an idle row, each padded to `num_nodes`; int64 index tensors in one transfer."""
        tokens = np.zeros((len(trees), num_nodes), dtype=np.int64)
        parents = np.zeros_like(tokens)
        parents[:, 0] = -1
        depths = np.ones_like(tokens)
        depths[:, 0] = 0
        for row, tree in enumerate(trees):
            if tree is not None:
                size = len(tree)
                tokens[row, :size] = tree.tokens.numpy()
                parents[row, :size] = tree.parents.numpy()
                depths[row, :size] = tree.depths.numpy()
        ancestry = _ancestry(parents, int(depths.max()))
        rows = np.array([lengths, rope_deltas])
        sent = _send([rows[0], rows[1], tokens, depths, ancestry], device)
        return cls(
            lengths=tuple(lengths),
            paddings=tuple(num_nodes - (0 if tree is None else len(tree)) for tree in trees),
            committed=sent[0],
            rope_deltas=sent[1],
            tokens=sent[2],
            depths=sent[3],
            ancestry=sent[4],
            host_parents=parents,
            host_depths=depths,
        )

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @functools.cached_property
    def positions(self) -> Tensor:
        """(R, T) int64, in tokens."""
        return self.committed[:, None] + self.depths

    @property
    def rope_positions(self) -> Tensor:
        """(R, T) int64, as rotary embeddings count."""
        return self.positions + self.rope_deltas[:, None]

    @functools.cached_property
    def ancestors(self) -> Tensor:
        """(R, T, T) bool: [r, t, j] is True where j is t or one of its ancestors."""
        rows, nodes = self.tokens.shape
        mask = torch.zeros(rows, nodes, nodes + 1, dtype=torch.bool, device=self.tokens.device)
        return mask.scatter_(2, self.ancestry, True)[:, :, :nodes]

    @functools.cached_property
    def ancestor_weights(self) -> Tensor:
        """(R, T, T) float64: x @ this sums x (R, heads, T) over each node and its ancestors."""
        return self.ancestors.mT.double()

    @functools.cached_property
    def levels(self) -> list[list[tuple[Tensor, Tensor]]]:
        """For each row and depth from 0: the nodes (n,) of that depth and their strict ancestors (n, depth)."""
        deepest = self.host_depths.max(axis=1)
        found = []
        for row, depths in enumerate(self.host_depths):
            nodes = [torch.from_numpy(np.flatnonzero(depths == d)) for d in range(deepest[row] + 1)]
            nodes = [level.to(self.tokens.device) for level in nodes]
            found.append([(n, self.ancestry[row, n, 1 : d + 1]) for d, n in enumerate(nodes)])
        return found

    def convolution_columns(self, width: int) -> Tensor:
        """(R, T, width) int64 into [width - 1 cached columns ; nodes], oldest first: the inputs of each node's convolution.

        A node sees itself and its width - 1 nearest ancestors, continuing into the cached columns above the root.
        """
        assert width <= self.ancestry.shape[2]
        steps = torch.arange(width - 1, -1, -1, device=self.tokens.device)
        above_root = steps - self.depths[:, :, None]  # how many tokens before the root
        nearest = self.ancestry[:, :, :width].flip(2)
        return torch.where(above_root > 0, width - 1 - above_root, width - 1 + nearest)

    def on(self, device: torch.device) -> NodeBatch:
        """The same on another device of a spread target, moved once a pass."""
        if device == self.tokens.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = dataclasses.replace(
                self,
                committed=self.committed.to(device),
                rope_deltas=self.rope_deltas.to(device),
                tokens=self.tokens.to(device),
                depths=self.depths.to(device),
                ancestry=self.ancestry.to(device),
            )
        return self._elsewhere[device]


@dataclass(frozen=True, eq=False)
class PathBatch:
    """The nodes to commit, one path a row, root first; an idle row commits nothing."""

    counts: tuple[int, ...]
    """Nodes of each row's path."""
    nodes: Tensor  # (R, P) int64, root first, zero beyond the row's count
    is_on_path: Tensor  # (R, P) bool, False beyond the row's count
    moved: Tensor  # (3, M) int64: row, where its cache entry lies, where it belongs
    columns: (
        Tensor  # (R, C) int64 into [C cached columns ; nodes]: the last C of the longer sequence
    )
    _elsewhere: dict[torch.device, PathBatch] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        paths: Sequence[Sequence[int]],
        lengths: Sequence[int],
        nodes_from: int,
        num_columns: int,
        device: torch.device,
    ) -> PathBatch:
        """Node indices a row, [] for an idle one. The nodes lie from cache place `nodes_from` on; entries that already lie
        where they belong do not move.
        """
        counts = tuple(len(path) for path in paths)
        nodes = np.zeros((len(paths), max(*counts, 1)), dtype=np.int64)
        is_on_path = np.zeros_like(nodes)
        columns = np.zeros((len(paths), num_columns), dtype=np.int64)
        moved = []
        for row, path in enumerate(paths):
            nodes[row, : len(path)] = path
            is_on_path[row, : len(path)] = 1
            longer = np.concatenate([np.arange(num_columns), num_columns + nodes[row, : len(path)]])
            columns[row] = longer[len(path) :]
            source = nodes_from + nodes[row, : len(path)]
            target = lengths[row] + np.arange(len(path))
            moved.append(np.stack([np.full_like(source, row), source, target])[:, source != target])
        found = _send([nodes, is_on_path, np.concatenate(moved, axis=1), columns], device)
        return cls(counts, found[0], found[1].bool(), found[2], found[3])

    def on(self, device: torch.device) -> PathBatch:
        """The same on another device of a spread target, moved once a commit."""
        if device == self.nodes.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = dataclasses.replace(
                self,
                nodes=self.nodes.to(device),
                is_on_path=self.is_on_path.to(device),
                moved=self.moved.to(device),
                columns=self.columns.to(device),
            )
        return self._elsewhere[device]


def _ancestry(parents: NDArray[np.int64], deepest: int) -> NDArray[np.int64]:
    """(R, T, A): node, parent, grandparent, ...; T beyond the root."""
    rows, nodes = parents.shape
    steps = -(-(deepest + 1) // _ANCESTRY_STEP) * _ANCESTRY_STEP
    table = np.full((rows, nodes, steps), nodes, dtype=np.int64)
    above = np.concatenate([np.where(parents < 0, nodes, parents), np.full((rows, 1), nodes)], 1)
    current = np.broadcast_to(np.arange(nodes), (rows, nodes))
    for step in range(deepest + 1):
        table[:, :, step] = current
        current = np.take_along_axis(above, current, axis=1)
    return table


def _send(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """All arrays as one block of memory to the device; without waiting for it when it is a GPU."""
    block = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        block = block.pin_memory()
    parts = block.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
