"""A draft tree as SVG: depth to the right, the accepted path and the bonus token dark, other nodes as strong as likely."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evaluation.drawing import DrawnTree
from evaluation.html import text, visible

COLUMN, ROW, MARGIN, LABEL = 124, 17, 12, 112
CHARACTER = 7.3
MAX_NODES = 40
"""Drawn at most, besides the accepted path: the likeliest ones, which are a tree themselves."""


@dataclass(frozen=True)
class _Node:
    label: str
    depth: int
    row: int
    parent: int
    is_accepted: bool
    is_bonus: bool
    child_rank: int
    prob: float

    @property
    def x(self) -> int:
        return MARGIN + COLUMN * self.depth

    @property
    def y(self) -> int:
        return MARGIN + ROW * self.row + ROW // 2


def tree_chart(tree: DrawnTree) -> str:
    nodes = _layout(tree)
    width = 2 * MARGIN + COLUMN * max(node.depth for node in nodes) + LABEL
    height = 2 * MARGIN + ROW * (1 + max(node.row for node in nodes))
    below = sorted(nodes[1:], key=lambda node: node.is_accepted)  # the accepted path on top
    edges = [_edge(nodes[node.parent], node) for node in below]
    labels = [_text(node) for node in nodes]
    return (
        f'<div class="scroll tree"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="draft tree with its accepted path">{"".join(edges + labels)}</svg></div>'
    )


def num_left_out(tree: DrawnTree) -> int:
    return len(tree.parents) - len(_kept(tree))


def _kept(tree: DrawnTree) -> list[int]:
    return sorted({*range(min(len(tree.parents), MAX_NODES + 1)), *tree.accepted})


def _layout(tree: DrawnTree) -> list[_Node]:
    """The bonus token hangs below the accepted path's end. Leaves take rows in preorder, an inner node its first child's."""
    kept = _kept(tree)
    place = {node: index for index, node in enumerate(kept)}
    end, bonus = place[tree.accepted[-1]], len(kept)
    parents = [*(place.get(tree.parents[node], -1) for node in kept), end]
    rows = _rows(parents)
    accepted = {place[node] for node in tree.accepted}
    drafted = [
        _Node(
            _label(tree.texts[node]),
            tree.depths[node],
            rows[index],
            parents[index],
            index in accepted,
            False,
            tree.child_ranks[node],
            math.exp(tree.log_probs[node]),
        )
        for index, node in enumerate(kept)
    ]
    depth = tree.depths[tree.accepted[-1]] + 1
    return [*drafted, _Node(_label(tree.bonus), depth, rows[bonus], end, True, True, 0, 1.0)]


def _rows(parents: list[int]) -> list[int]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, next_row, stack = [0] * len(parents), 0, [0]
    while stack:
        node = stack.pop()
        rows[node] = next_row
        next_row += not children[node]
        stack += reversed(children[node])
    return rows


def _edge(parent: _Node, node: _Node) -> str:
    start = parent.x + CHARACTER * len(parent.label) + 5
    middle, end = node.x - 16, node.x - 4
    kind = "accepted" if node.is_accepted else "drafted"
    width = 2.4 if node.is_accepted else 0.8 + node.prob
    dash = ' stroke-dasharray="3 3"' if node.is_bonus else ""
    return (
        f'<path class="{kind}" d="M{start:.0f} {parent.y} L{max(start, node.x - 34):.0f} {parent.y}'
        f' C{middle} {parent.y} {node.x - 30} {node.y} {end} {node.y}" fill="none"'
        f' stroke="currentColor" stroke-width="{width:.2f}" opacity="{_opacity(node):.2f}"{dash}/>'
    )


def _text(node: _Node) -> str:
    kind = "accepted" if node.is_accepted else "drafted"
    weight = ' font-weight="700"' if node.is_accepted else ""
    what = "bonus token: the target's own" if node.is_bonus else _described(node)
    choice = (
        f'<tspan font-size="10" dy="-3"> #{node.child_rank + 1}</tspan>'
        if node.is_accepted and node.child_rank
        else ""
    )
    return (
        f'<text class="{kind}" x="{node.x}" y="{node.y + 4}" fill="currentColor" opacity="{_opacity(node):.2f}"{weight}>'
        f"{text(node.label)}{choice}<title>{what}</title></text>"
    )


def _described(node: _Node) -> str:
    if node.depth == 0:
        return "anchor"
    return f"path probability {node.prob:.3g}, choice {node.child_rank + 1} of its depth"


def _opacity(node: _Node) -> float:
    return 1.0 if node.is_accepted else 0.6 + 0.4 * math.sqrt(node.prob)


def _label(token: str) -> str:
    """A token as one short, visible word: a space is part of it."""
    shown = visible(token.replace("\n", "↵").replace("\t", "→").replace(" ", "·")) or "<>"
    return shown if len(shown) <= 10 else shown[:9] + "…"
