"""Charts as inline SVG, written here so that a report is one file that needs no network and no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 16, 48
INK, GRID = "#4a5568", "#e6eaf0"


@dataclass(frozen=True)
class Series:
    """A line. `band` has (low, high) a point."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    band: list[tuple[float, float]] = field(default_factory=list)
    is_dashed: bool = False
    has_line: bool = True
    has_markers: bool = True


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: list[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        """0..1 along the axis."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return (value - low) / (high - low) if high > low else 0.5


def linear_axis(label: str, values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis with about five round ticks around `values`."""
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    span = (high - low) or 1.0
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = [step * index for index in range(first, last + 1)]
    return Axis(label, ticks[0], ticks[-1], ticks)


def doubling_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis with a tick at every value."""
    low, high = min(values), max(values)
    return Axis(label, low / 1.2, high * 1.2, sorted(set(values)), is_log=True)


def line_chart(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Lines, bands and markers over a grid, with a legend below."""
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + plot_width * x_axis.place(value)

    def y(value: float) -> float:
        return TOP + plot_height * (1 - y_axis.place(value))

    parts = [_open(WIDTH, HEIGHT), *_grid(x_axis, y_axis, x, y)]
    for line in series:
        if line.band:
            upper = [f"{x(px):.1f},{y(high):.1f}" for (px, _), (_, high) in zip(line.points, line.band, strict=True)]  # fmt: skip
            lower = [f"{x(px):.1f},{y(low):.1f}" for (px, _), (low, _) in zip(line.points, line.band, strict=True)]  # fmt: skip
            parts.append(
                f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{line.colour}" opacity="0.14"/>'
            )
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in line.points)
        if line.has_line:
            dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.2"'
                f' stroke-linejoin="round"{dash}/>'
            )
        if line.has_markers:
            parts += [
                f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.6" fill="{line.colour}" stroke="#fff">'
                f"<title>{escape(line.name)}: {py:.3g} at {px:.4g}</title></circle>"
                for px, py in line.points
            ]
    return "".join(parts) + "</svg>" + legend([(line.name, line.colour) for line in series])


def stacked_bars(rows: Sequence[tuple[str, dict[str, float]]], colours: Mapping[str, str]) -> str:
    """Horizontal bars of shares that add up to 1, a row each."""
    label_width, bar_height, gap = 120, 24, 12
    width = WIDTH - label_width - 20
    height = len(rows) * (bar_height + gap) + gap
    parts = [_open(WIDTH, height)]
    for index, (name, shares) in enumerate(rows):
        top, left = gap + index * (bar_height + gap), float(label_width)
        parts.append(_text(label_width - 8, top + 16, name, "end"))
        for stage, share in shares.items():
            size = share * width
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{size:.1f}" height="{bar_height}"'
                f' fill="{colours[stage]}"><title>{escape(stage)} {share:.1%}</title></rect>'
            )
            if size > 38:
                parts.append(_text(left + size / 2, top + 16, f"{share:.0%}", "middle", "#fff"))
            left += size
    return "".join(parts) + "</svg>" + legend(list(colours.items()))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in entries
    )
    return f'<div class="legend">{items}</div>'


def _grid(
    x_axis: Axis, y_axis: Axis, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks:
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{GRID}"/>'
        )
        parts.append(_text(LEFT - 8, y(tick) + 4, _number(tick), "end"))
    for tick in x_axis.ticks:
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="{INK}"/>'
        )
        parts.append(_text(x(tick), bottom + 19, _number(tick), "middle"))
    parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="{INK}"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, x_axis.label, "middle"))
    middle = TOP + (bottom - TOP) / 2
    parts.append(
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle"'
        f' fill="{INK}">{escape(y_axis.label)}</text>'
    )
    return parts


def _open(width: float, height: float) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.4g}"
