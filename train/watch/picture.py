"""Charts side by side in one SVG file, for a README or a slide: light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.files import atomic_path
from evaluation.charts import CHARACTER, HEIGHT, WIDTH, label
from evaluation.html import CHART_STYLE, COLOURS, text
from train.watch.log import RunLog
from train.watch.panels import Panel
from train.watch.shapes import all_panels

GAP, PAD, TITLE, LEGEND_LINE = 14, 14, 30, 20
MOST = 6
STYLE = """
svg { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
.panel { fill: var(--card); stroke: var(--line); } .title { font-size: 16px; font-weight: 600; fill: var(--ink); }
.ink { fill: var(--ink); } .far { fill: currentColor; }
"""


def write_picture(path: Path, runs: Sequence[RunLog]) -> None:
    """The first six charts that say most. Raises ValueError if nothing is logged or the name is not one of an SVG file."""
    panels = all_panels(runs)
    if not panels:
        raise ValueError(f"{runs[0].path} has no metric to draw; give a run that has logged steps")
    write_panels(path, f"training of {' and '.join(run.name for run in runs)}", panels[:MOST])


def write_panels(path: Path, title: str, panels: Sequence[Panel], num_columns: int = 2) -> None:
    """All panels, row by row. Raises ValueError if `path` does not end in .svg."""
    columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // columns)
    lines = max(len(_legend_lines(panel)) for panel in panels)
    width, height = WIDTH + 2 * PAD, TITLE + HEIGHT + 2 * PAD + lines * LEGEND_LINE
    parts = []
    for index, panel in enumerate(panels):
        left = GAP + (index % columns) * (width + GAP)
        top = GAP + (index // columns) * (height + GAP)
        parts.append(f'<g transform="translate({left} {top})">{_panel(panel, width, height)}</g>')
    whole = (columns * (width + GAP) + GAP, num_rows * (height + GAP) + GAP)
    write_svg(path, title, *whole, "".join(parts))


def write_svg(path: Path, title: str, width: float, height: float, body: str) -> None:
    """One file in the page's colours, light or dark. Raises ValueError if `path` does not end in .svg."""
    if path.suffix != ".svg":
        raise ValueError(f"{path} is not the name of an SVG file; let it end in .svg")
    with atomic_path(path) as aside:
        aside.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
            f' height="{height:.0f}" role="img" aria-label="{text(title)}"><style>{COLOURS}{CHART_STYLE}{STYLE}</style>'
            f'<rect width="100%" height="100%" fill="var(--page)"/>{body}</svg>\n',
            encoding="utf-8",
        )


def _panel(panel: Panel, width: int, height: int) -> str:
    parts = [
        f'<rect class="panel" width="{width}" height="{height}" rx="10"/>',
        label(PAD, PAD + 12, panel.title, "start", "title"),
        f'<g transform="translate({PAD} {TITLE + PAD - 8})">{"".join(panel.parts)}</g>',
    ]
    for index, line in enumerate(_legend_lines(panel)):
        top = TITLE + PAD + HEIGHT + 4 + index * LEGEND_LINE
        parts += [
            f'<g class="{colour}"><rect x="{left:.0f}" y="{top}" width="12" height="12" rx="3" fill="currentColor"'
            f' opacity="{strength:.2f}"/></g>{label(left + 18, top + 10, name, "start")}'
            for left, name, colour, strength in line
        ]
    return "".join(parts)


def _legend_lines(panel: Panel) -> list[list[tuple[float, str, str, float]]]:
    """(left, name, class, opacity) of the legend's entries, broken into lines."""
    lines: list[list[tuple[float, str, str, float]]] = [[]]
    left = float(PAD)
    for name, colour, strength in panel.legend:
        size = 18 + CHARACTER * len(name) + 18
        if left + size > WIDTH + PAD and lines[-1]:
            lines.append([])
            left = float(PAD)
        lines[-1].append((left, name, colour, strength))
        left += size
    return lines
