"""A draft tree as SVG: depth to the right, the accepted path and the bonus token dark, other nodes as strong as likely."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from evaluation.drawing import DrawnTree

COLUMN, ROW, MARGIN, LABEL = 116, 17, 12, 82
CHARACTER = 7.3
ACCEPTED, DRAFTED = "#0f766e", "#64748b"


@dataclass(frozen=True)
class _Node:
    text: str
    depth: int
    row: int
    parent: int
    is_accepted: bool
    is_bonus: bool
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
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' xmlns="http://www.w3.org/2000/svg">{"".join(edges + labels)}</svg>'
    )


def _layout(tree: DrawnTree) -> list[_Node]:
    """The bonus token hangs below the accepted path's end. Leaves take rows in preorder, an inner node its first child's."""
    end, bonus = tree.accepted[-1], len(tree.parents)
    parents = [*tree.parents, end]
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, next_row, stack = [0] * len(parents), 0, [0]
    while stack:
        node = stack.pop()
        rows[node] = next_row
        next_row += not children[node]
        stack += reversed(children[node])
    accepted = {*tree.accepted, bonus}
    texts = [*tree.texts, tree.bonus]
    depths = [*tree.depths, tree.depths[end] + 1]
    log_probs = [*tree.log_probs, 0.0]
    return [
        _Node(
            texts[node],
            depths[node],
            rows[node],
            parents[node],
            node in accepted,
            node == bonus,
            math.exp(log_probs[node]),
        )
        for node in range(len(parents))
    ]


def _edge(parent: _Node, node: _Node) -> str:
    start = parent.x + CHARACTER * len(_label(parent.text)) + 5
    middle, end = node.x - 16, node.x - 4
    colour = ACCEPTED if node.is_accepted else DRAFTED
    width = 2.4 if node.is_accepted else 0.8 + node.prob
    dash = ' stroke-dasharray="3 3"' if node.is_bonus else ""
    return (
        f'<path d="M{start} {parent.y} L{node.x - 34} {parent.y}'
        f' C{middle} {parent.y} {node.x - 30} {node.y} {end} {node.y}" fill="none"'
        f' stroke="{colour}" stroke-width="{width:.2f}" opacity="{_opacity(node):.2f}"{dash}/>'
    )


def _text(node: _Node) -> str:
    colour = ACCEPTED if node.is_accepted else DRAFTED
    weight = ' font-weight="700"' if node.is_accepted else ""
    what = "bonus token" if node.is_bonus else f"path probability {node.prob:.3g}"
    return (
        f'<text x="{node.x}" y="{node.y + 4}" fill="{colour}" opacity="{_opacity(node):.2f}"{weight}>'
        f"{escape(_label(node.text))}<title>{what}</title></text>"
    )


def _opacity(node: _Node) -> float:
    return 1.0 if node.is_accepted else 0.6 + 0.4 * math.sqrt(node.prob)


def _label(text: str) -> str:
    """A token as one short, visible word: a space is part of it."""
    shown = text.replace("\n", "↵").replace("\t", "→").replace(" ", "·")
    shown = "".join(c if c.isprintable() else f"<{ord(c):02x}>" for c in shown) or "<>"
    return shown if len(shown) <= 10 else shown[:9] + "…"
