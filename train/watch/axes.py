"""Axes that a training run needs besides those of evaluation/charts.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evaluation.charts import Axis, linear_axis


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """Logarithmic around positive values, with ticks at 1, 2 and 5 times powers of ten, or at powers alone over many of them."""
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9)
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = max((mark for mark in marks if mark <= low * (1 + 1e-9)), default=marks[0])
    above = min((mark for mark in marks if mark >= high * (1 - 1e-9)), default=marks[-1])
    above = above if above > below else marks[marks.index(below) + 1]
    return Axis(label, below, above, [m for m in marks if below <= m <= above], is_log=True)


def numbers_axis(label: str, last: float) -> Axis:
    """Whole numbers from 1 to `last`, each with room around it; a tick at each, or at every few of many."""
    every = max(1, math.ceil(last / 16))
    return Axis(label, 0.4, last + 0.6, [float(n) for n in range(1, int(last) + 1, every)])


def share_axis(label: str, highest: float = 1.0) -> Axis:
    """From 0 to the tenth above `highest`; what is no share gets an axis too."""
    if highest > 1:
        return linear_axis(label, [0.0, highest])
    top = max(math.ceil(highest * 10 - 1e-9), 1)
    every = 1 if top <= 5 else 2
    return Axis(label, 0.0, top / 10, [n / 10 for n in range(0, top + 1, every)])
