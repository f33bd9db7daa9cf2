"""Charts as inline SVG, written here so that a report is one file that needs no network and no script.

Colours are classes of the page's style (evaluation/html.py), so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evaluation.html import text

WIDTH, HEIGHT = 620, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 16, 48
CHARACTER = 6.6  # width of a letter at 12 px, on the safe side


@dataclass(frozen=True)
class Series:
    """A line, or single points. `band` has (low, high) a point, drawn as an area, or as whiskers where there is no line."""

    name: str
    """In the legend; without one the series is explained elsewhere."""
    points: list[tuple[float, float]]
    colour: str
    """A class of the page, `c0` to `c7`."""
    band: list[tuple[float, float]] = field(default_factory=list)
    strength: float = 1.0
    """Opacity of the line: budgets of one acceptor share a colour."""
    is_dashed: bool = False
    has_line: bool = True
    has_markers: bool = True
    is_hollow: bool = False
    hint: str = ""
    """Said of a marker under the pointer, in place of the name."""


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


def line_chart(title: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Lines, bands and markers over a grid, with a legend below. `title` is what a screen reader says."""
    return svg(title, WIDTH, HEIGHT, line_parts(series, x_axis, y_axis)) + legend(keys(series))


def line_parts(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> list[str]:
    """The elements of a line chart, WIDTH wide and HEIGHT high."""
    x, y = plot_places(x_axis, y_axis)
    parts = grid(x_axis, y_axis)
    for line in series:
        parts.append(f'<g class="{line.colour}">{"".join(_series(line, x, y))}</g>')
    return parts


def keys(series: Sequence[Series]) -> list[tuple[str, str, float]]:
    """The legend's entries."""
    return [(line.name, line.colour, line.strength) for line in series if line.name]


def plot_places(
    x_axis: Axis, y_axis: Axis
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Where a value of each axis lies on the chart."""
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(value: float) -> float:
        return LEFT + plot_width * x_axis.place(value)

    def y(value: float) -> float:
        return TOP + plot_height * (1 - y_axis.place(value))

    return x, y


def _series(line: Series, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    parts = []
    places = [(x(px), y(py)) for px, py in line.points]
    bands = [(y(low), y(high)) for low, high in line.band]
    if bands and line.has_line and len(places) > 1:
        upper = [f"{px:.1f},{high:.1f}" for (px, _), (_, high) in zip(places, bands, strict=True)]
        lower = [f"{px:.1f},{low:.1f}" for (px, _), (low, _) in zip(places, bands, strict=True)]
        corners = " ".join(upper + lower[::-1])
        parts.append(f'<polygon points="{corners}" fill="currentColor" opacity="0.15"/>')
    elif bands:
        parts += [
            f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
            ' stroke="currentColor" stroke-width="1.5"/>'
            for (px, _), (low, high) in zip(places, bands, strict=True)
        ]
    if line.has_line and len(places) > 1:
        dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="2.2"'
            f' stroke-linejoin="round" opacity="{line.strength:.2f}"{dash}/>'
        )
    if line.has_markers:
        fill = 'class="hollow"' if line.is_hollow else 'fill="currentColor"'
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.8" {fill} stroke="currentColor" stroke-width="1.6"'
            f' opacity="{line.strength:.2f}">'
            f"<title>{text(line.hint or line.name)}: {value:.3g} at {at:.4g}</title></circle>"
            for (px, py), (at, value) in zip(places, line.points, strict=True)
        ]
    return parts


@dataclass(frozen=True)
class Bar:
    """Parts that stand behind one another, in the order of the chart's colours."""

    name: str
    parts: Mapping[str, float]
    note: str = ""
    """Written behind the bar."""


def stacked_bars(
    title: str,
    bars: Sequence[Bar],
    colours: Mapping[str, tuple[str, float]],
    describe: Callable[[float], str],
) -> str:
    """Horizontal bars to one scale. colours: class and opacity of each part; describe: a part's size in words."""
    note_width, bar_height, gap = 90, 24, 12
    label_width = 16 + CHARACTER * max(len(bar.name) for bar in bars)
    longest = max(sum(bar.parts.values()) for bar in bars) or 1.0
    scale = (WIDTH - label_width - note_width) / longest
    parts = []
    for index, bar in enumerate(bars):
        top, left = gap + index * (bar_height + gap), label_width
        parts.append(label(label_width - 8, top + 16, bar.name, "end"))
        for name, size in bar.parts.items():
            colour, strength = colours[name]
            width = size * scale
            parts.append(
                f'<rect class="{colour}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{bar_height}"'
                f' fill="currentColor" opacity="{strength:.2f}">'
                f"<title>{text(name)}: {text(describe(size))}</title></rect>"
            )
            if width > 44 and strength > 0.6:
                parts.append(label(left + width / 2, top + 16, describe(size), "middle", "on"))
            left += width
        parts.append(label(left + 8, top + 16, bar.note, "start"))
    height = len(bars) * (bar_height + gap) + gap
    entries = [(name, colour, strength) for name, (colour, strength) in colours.items()]
    return svg(title, WIDTH, height, parts) + legend(entries)


def legend(entries: Sequence[tuple[str, str, float]]) -> str:
    """Name, class and opacity."""
    items = "".join(
        f'<span class="{colour}"><i style="opacity:{strength:.2f}"></i><span>{text(name)}</span></span>'
        for name, colour, strength in entries
    )
    return f'<div class="legend">{items}</div>'


def svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """As wide as its place, and scrolled where that would be too narrow to read."""
    return (
        f'<div class="chart"><svg viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
        f' aria-label="{text(title)}">{"".join(parts)}</svg></div>'
    )


def label(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{of_kind}>{text(content)}</text>'


def grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    """Gridlines, ticks and labels."""
    x, y = plot_places(x_axis, y_axis)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y_axis.ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(label(LEFT - 8, y(tick) + 4, f"{tick:.4g}", "end"))
    for tick in x_axis.ticks:
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(label(x(tick), bottom + 19, f"{tick:.4g}", "middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(label((LEFT + right) / 2, HEIGHT - 8, x_axis.label, "middle"))
    middle = TOP + (bottom - TOP) / 2
    parts.append(
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">'
        f"{text(y_axis.label)}</text>"
    )
    return parts
