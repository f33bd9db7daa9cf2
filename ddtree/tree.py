"""The draft tree of one block: what the target verifies in one pass.

T tree nodes with the root (the anchor), K block size. Host tensors: a tree is small and read node by node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Nodes in the total order of ddtree/order.py, root first, so every parent comes before its children."""

    tokens: Tensor  # (T,) int64; tokens[0] is the anchor
    parents: Tensor  # (T,) int64; -1 for the root
    depths: Tensor  # (T,) int64; 0 for the root
    child_ranks: Tensor  # (T,) int64, place in the slot's top list; 0 for the root
    log_probs: Tensor  # (T,) float32, of the path from the root; 0 for the root

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def ancestors(self) -> Tensor:
        """(T, T) bool: [t, j] is True where j is t or one of its ancestors."""
        parents = self.parents.numpy().clip(min=0)  # the root stands in for its own parent
        mask = np.zeros((len(self), len(self)), dtype=np.bool_)
        node = every = np.arange(len(self))
        for _ in range(int(self.depths.max()) + 1):
            mask[every, node] = True
            node = parents[node]
        return torch.from_numpy(mask)

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included."""
        parents = self.parents.tolist()
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return path[::-1]


def chain_tree(tokens: Tensor) -> DraftTree:
    """The tree without branches: tokens (K,) int64, anchor first. One token alone is plain decoding."""
    places = torch.arange(tokens.shape[0])
    return DraftTree(
        tokens=tokens.cpu().long(),
        parents=places - 1,
        depths=places,
        child_ranks=torch.zeros_like(places),
        log_probs=torch.zeros(tokens.shape[0]),
    )
