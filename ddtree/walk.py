"""The walk: how many tokens a verify pass yields. Lossless at any temperature, for any drafter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ddtree.tree import DraftTree


@dataclass(frozen=True)
class Accepted:
    nodes: list[int]
    """Accepted nodes, root first; the verify pass emits `len(nodes) - 1` draft tokens and the bonus."""
    bonus: int
    """The target's token after the last of them."""


def walk_tree(tree: DraftTree, target_tokens: Tensor) -> Accepted:
    """Follow the target's choices from the root until one was not drafted.

    target_tokens: (T,) int64, the target's token after each node, root first: its argmax at temperature 0, otherwise one
    sample a node. Returns the accepted nodes and the bonus token.
    Raises ValueError if the lengths differ. Source: DDTree, arXiv:2604.12989.
    """
    if target_tokens.shape != (len(tree),):
        raise ValueError(
            f"target_tokens has shape {tuple(target_tokens.shape)} for a tree of {len(tree)} nodes; "
            "give one target token a node, root first"
        )
    chosen = target_tokens.tolist()  # the only transfer from the device
    children = {
        edge: node
        for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    nodes = [0]
    while (child := children.get((nodes[-1], chosen[nodes[-1]]))) is not None:
        nodes.append(child)
    return Accepted(nodes, chosen[nodes[-1]])
