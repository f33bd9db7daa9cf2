"""Fewer points than a log has lines, without hiding a spike: means of neighbours, and the band between their extremes."""

from __future__ import annotations

from train.watch.log import Points

MOST = 240
"""Points of a curve on a chart some 550 pixels wide."""


def thinned(points: Points, most: int = MOST) -> tuple[Points, list[tuple[float, float]]]:
    """At most `most` points, each the mean of as many neighbours, with (lowest, highest) of them; no band where none is joined."""
    size = -(-len(points) // most)
    if size <= 1:
        return points, []
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
    return means, [(min(y for _, y in group), max(y for _, y in group)) for group in groups]


def spread(count: int, most: int) -> list[int]:
    """At most `most` indices of `count` things in order, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
