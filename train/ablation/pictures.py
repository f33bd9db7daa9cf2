"""An ablation as two pictures: every loss at every budget with its interval, and the training curves of the losses.

V variants, C columns (the chain and the budgets).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.charts import Axis, label, linear_axis
from evaluation.html import text
from train.ablation.runs import AblationRun
from train.ablation.settings import Ablation
from train.ablation.table import AblationRow
from train.watch.log import Points, RunLog, read_run
from train.watch.panels import Panel, run_series, series_panel, steps_axis
from train.watch.picture import GAP, PAD, write_panels, write_svg
from train.watch.thinning import thinned

ROW, COLUMN, NAMES, TOP, BOTTOM = 26, 132, 190, 84, 46
FAR = 20.0
"""Percent."""
MOST_POINTS = 30
"""Of a curve: the runs are short and noisy, and there are many of them."""
COMPARABLE = (
    ("train/chain_hits", "Drafted ahead: chain", "slots"),
    ("train/tree_hits", "Drafted ahead: tree (losses that build it)", "slots"),
    ("train/grad_norm", "Gradient norm", "norm"),
    ("train/mean_weight", "Mean weight of a slot", "weight"),
)
"""What is logged of every loss and means the same; the losses themselves do not."""


def draw_acceptance(path: Path, ablation: Ablation, rows: Sequence[AblationRow]) -> None:
    """Change over the baseline by variant and column, after the fit, with its 95 % interval. rows: of `ablation_rows`."""
    fitted = [row for row in rows if row.fitted and row.variant != ablation.baseline]
    baseline = {
        row.acceptor: row for row in rows if row.fitted and row.variant == ablation.baseline
    }
    keys, names = list(baseline), list(dict.fromkeys(row.variant for row in fitted))
    axis = _change_axis(fitted)
    width, height = NAMES + len(keys) * COLUMN + 2 * PAD, TOP + len(names) * ROW + BOTTOM
    bottom = TOP + len(names) * ROW
    parts = [_heading(ablation, fitted)]
    for column, key in enumerate(keys):
        left = NAMES + column * COLUMN
        parts += _column_head(key, baseline[key], ablation.baseline, left)
        parts += _scale(axis, left, bottom)
    cells = {(row.variant, row.acceptor): row for row in fitted}
    for place, name in enumerate(names):
        y = TOP + place * ROW + ROW / 2
        parts.append(label(NAMES - 12, y + 4, name, "end", "ink"))
        parts += [
            _mark(cells[name, key], axis, NAMES + column * COLUMN, y)
            for column, key in enumerate(keys)
        ]
    frame = f'<rect class="panel" width="{width}" height="{height}" rx="10"/>'
    inner = f'<g transform="translate({GAP} {GAP})">{frame}{"".join(parts)}</g>'
    write_svg(path, f"losses over {ablation.baseline}", width + 2 * GAP, height + 2 * GAP, inner)


def draw_curves(path: Path, ablation: Ablation) -> None:
    """Means over seeds of what the training logs say of every loss alike."""
    logs = {
        name: [read_run(AblationRun(ablation, name, seed).folder) for seed in ablation.seeds]
        for name in ablation.variants
    }
    panels = [
        panel for spec in COMPARABLE if (panel := _curves(logs, *spec, ablation.warmup_steps))
    ]
    if panels:
        write_panels(path, "training of each loss, mean over seeds", panels)


def mean_curve(runs: Sequence[RunLog], name: str) -> Points:
    """At the steps that every run has logged."""
    curves = [dict(run.curve(name)) for run in runs]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return [(step, math.fsum(curve[step] for curve in curves) / len(curves)) for step in shared]


def _curves(
    logs: Mapping[str, Sequence[RunLog]], name: str, title: str, unit: str, warmup_steps: int
) -> Panel | None:
    series = []
    for index, (variant, runs) in enumerate(logs.items()):
        points, _ = thinned(mean_curve(runs, name), MOST_POINTS)
        if points:
            series.append(run_series(index, variant, points, has_markers=False))
    if not series:
        return None
    heights = [y for line in series for _, y in line.points]
    note = f"After {warmup_steps} steps of decayed cross-entropy."
    return series_panel(title, note, series, steps_axis(series), linear_axis(unit, heights), name)


def _change_axis(rows: Sequence[AblationRow]) -> Axis:
    """In percent, 0 inside. What is further away than FAR would hide the differences that matter: it is marked at the edge."""
    ends = [100 * end for row in rows for end in (row.relative_ci95 or (row.relative,))]
    near = [end for end in ends if abs(end) <= FAR]
    return linear_axis("", [0.0, *near, *([-FAR] if min(ends) < -FAR else [])])


def _heading(ablation: Ablation, rows: Sequence[AblationRow]) -> str:
    first = rows[0]
    seeds = f"{first.num_seeds} seed{'s' * (first.num_seeds > 1)}"
    said = (
        f"{first.num_prompts} held-out prompts, {seeds}, replay after each run's temperature fit; "
        "95 % intervals paired by prompt"
    )
    title = f"Acceptance length over {ablation.baseline}, in percent"
    return label(PAD, PAD + 14, title, "start", "title") + label(PAD, PAD + 34, said, "start")


def _column_head(key: str, base: AblationRow, baseline: str, left: float) -> list[str]:
    middle = left + COLUMN / 2
    return [
        label(middle, TOP - 20, key.replace("-", " "), "middle", "ink"),
        label(middle, TOP - 6, f"{baseline} {base.acceptance:.2f}", "middle"),
    ]


def _scale(axis: Axis, left: float, bottom: float) -> list[str]:
    """Gridlines of one column, and its ends in percent."""
    parts = []
    for tick in axis.ticks:
        x = _x(axis, tick, left)
        kind = "axis" if abs(tick) < 1e-9 else "gridline"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
    for tick in dict.fromkeys((axis.ticks[0], 0.0, axis.ticks[-1])):
        parts.append(
            label(_x(axis, tick, left), bottom + 18, f"{tick:+g}" if tick else "0", "middle")
        )
    return parts


def _mark(row: AblationRow, axis: Axis, left: float, y: float) -> str:
    """A dot and its interval, coloured where the interval leaves 0 out; a number where it lies outside the axis."""
    low, high = row.relative_ci95 or (row.relative, row.relative)
    colour = "c1" if low > 0 else "c0" if high < 0 else "c7"
    hint = f"{row.variant}, {row.acceptor}: {row.relative:+.1%} ({low:+.1%} to {high:+.1%})"
    percent = 100 * row.relative
    if not axis.low <= percent <= axis.high:
        end, anchor = (axis.low, "start") if percent < axis.low else (axis.high, "end")
        mark = label(_x(axis, end, left), y + 4, f"{percent:+.0f} %", anchor, "far")
    else:
        ends = [_x(axis, min(max(100 * e, axis.low), axis.high), left) for e in (low, high)]
        mark = (
            f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y}" y2="{y}" stroke="currentColor" stroke-width="2"/>'
            f'<circle cx="{_x(axis, percent, left):.1f}" cy="{y}" r="4" fill="currentColor"/>'
        )
    return f'<g class="{colour}"><title>{text(hint)}</title>{mark}</g>'


def _x(axis: Axis, percent: float, left: float) -> float:
    room = 14
    return left + room + axis.place(percent) * (COLUMN - 2 * room)
