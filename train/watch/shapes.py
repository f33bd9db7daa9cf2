"""What an evaluation looks like inside, at the last one and on the way there: survival, recall, calibration, the walk.

A run alone: earlier evaluations fainter, in the same chart. Several runs: the last evaluation of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from evaluation.charts import Axis, Series, grid, keys, line_parts, linear_axis, plot_places
from evaluation.html import text
from train.watch.axes import numbers_axis, share_axis
from train.watch.log import Points, RunLog, numbered
from train.watch.panels import (
    DETAILS,
    HEADLINES,
    Panel,
    curve_panels,
    other_panels,
    run_colour,
    series_panel,
)
from train.watch.thinning import spread

EARLIER = 4
"""Evaluations drawn, the last one among them."""
MOST_COLUMNS = 60
"""Evaluations in the picture of the walk over steps."""
Line = Mapping[str, float]


def all_panels(runs: Sequence[RunLog]) -> list[Panel]:
    """Every chart of the page, what says most first."""
    return [
        *curve_panels(runs, HEADLINES),
        *shape_panels(runs),
        *curve_panels(runs, DETAILS),
        *other_panels(runs),
    ]


def shape_panels(runs: Sequence[RunLog]) -> list[Panel]:
    """Of the evaluations that have these metrics."""
    makers = (_survival, _walk_over_steps, _recall, _reliability, _first_choice, _walk)
    return [panel for make in makers if (panel := make(runs)) is not None]


def _survival(runs: Sequence[RunLog]) -> Panel | None:
    note = "Share of anchors whose first tokens up to this depth are all accepted"
    series = _shape(runs, _survival_prefix, "tree")
    if len(runs) == 1:
        series += _last(runs[0], "survival/chain_depth_", "chain")
    how = ": the chain dashed." if len(runs) == 1 else ", by the tree of each run's budget."
    return _by_number("Survival by depth", note + how, series, "depth (tokens drafted)", "anchors")


def _recall(runs: Sequence[RunLog]) -> Panel | None:
    """Every k of a run alone."""
    if len(runs) > 1:
        return None
    tops = (1, 4, 16, 64)
    series = []
    for index, top in enumerate(tops):
        for line in _last(runs[0], f"recall/top_{top}_slot_", ""):
            strength = 0.3 + 0.7 * (index + 1) / len(tops)
            series.append(Series(f"top {top}", line.points, "c1", strength=strength))
    note = "Is the recorded token among the slot's k likeliest, whatever came before it? Last evaluation."
    return _by_number("Recall of each slot", note, series, "slot", "recall")


def _first_choice(runs: Sequence[RunLog]) -> Panel | None:
    series = _shape(runs, lambda _: "recall/top_1_slot_", "top 1")
    note = "How often a slot's first choice is the recorded token."
    return _by_number("First choice of each slot", note, series, "slot", "recall")


def _reliability(runs: Sequence[RunLog]) -> Panel | None:
    series = [Series("true", [(0, 0), (1, 1)], "c7", is_dashed=True, has_markers=False)]
    for _, line, name, colour, strength in _shown(runs, lambda _: "calibration/right_bin_"):
        right = dict(numbered(line, "calibration/right_bin_"))
        expected = numbered(line, "calibration/expected_bin_")
        points = [(value, right[number]) for number, value in expected if number in right]
        if points:
            series.append(Series(name, points, colour, strength=strength))
    if len(series) == 1:
        return None
    note = "Nodes of the largest tree by path probability: how many of them were right. Below the line is over-confident."
    axes = share_axis("path probability"), share_axis("share that was right")
    return series_panel("Is the drafter's confidence true?", note, series, *axes)


def _walk(runs: Sequence[RunLog]) -> Panel | None:
    """Bars of a run alone, lines of several."""
    title, label = "Tokens that a verify pass emits", "tokens emitted"
    if len(runs) > 1:
        note = "Share of passes, by the tree of each run's budget; last evaluation."
        return _by_number(title, note, _shape(runs, _walk_prefix, "tree"), label, "passes")
    run = runs[0]
    series = _last(run, "walk/chain_emits_", "chain")
    series += _last(run, _walk_prefix(run), f"tree {run.tree_budget}")
    if not series:
        return None
    x_axis = numbers_axis(label, max(x for line in series for x, _ in line.points))
    highest = max(y for line in series for _, y in line.points)
    y_axis = share_axis("share of passes", highest)
    legend = [(line.name, line.colour, 0.85) for line in series]
    note = (
        "Share of passes at the last evaluation; their mean is the acceptance length (micro mean)."
    )
    return Panel(title, note, grid(x_axis, y_axis) + _bars(series, x_axis, y_axis), legend)


def _walk_over_steps(runs: Sequence[RunLog]) -> Panel | None:
    """A column an evaluation, a row a number of tokens, the stronger the more passes."""
    run = runs[0]
    found = [(line["step"], numbered(line, _walk_prefix(run))) for line in run.evaluations]
    columns = [(step, shares) for step, shares in found if shares]
    if len(runs) > 1 or len(columns) < 2:
        return None
    columns = [columns[index] for index in spread(len(columns), MOST_COLUMNS)]
    x_axis = linear_axis("optimizer step", [step for step, _ in columns], from_zero=True)
    y_axis = numbers_axis("tokens emitted", max(n for _, shares in columns for n, _ in shares))
    mean = [(step, sum(n * share for n, share in shares)) for step, shares in columns]
    line = Series("acceptance length (micro mean)", mean, "c0", has_markers=False)
    parts = [*_cells(columns, x_axis, y_axis), *line_parts([line], x_axis, y_axis)]
    note = f"The stronger, the more passes of the tree of {run.tree_budget} emit so many; the line is their mean."
    return Panel("Tokens that a pass emits, over training", note, parts, keys([line]))


Prefix = Callable[[RunLog], str]
"""What the metrics of a shape start with; a number follows."""


def _walk_prefix(run: RunLog) -> str:
    return f"walk/tree_{run.tree_budget}_emits_"


def _survival_prefix(run: RunLog) -> str:
    return f"survival/tree_{run.tree_budget}_depth_"


def _shape(runs: Sequence[RunLog], prefix: Prefix, name: str) -> list[Series]:
    """Some evaluations of a run alone, the last one of each of several runs."""
    return [
        Series(
            f"{name}, {said}" if len(runs) == 1 else said,
            numbered(line, prefix(run)),
            colour,
            strength=strength,
        )
        for run, line, said, colour, strength in _shown(runs, prefix)
    ]


def _last(run: RunLog, prefix: str, name: str) -> list[Series]:
    """Of the last evaluation that has it; nothing if none has."""
    points = [found for line in run.evaluations if (found := numbered(line, prefix))]
    is_chain = name == "chain"
    colour = "c0" if is_chain else "c1"
    return [Series(name, points[-1], colour, is_dashed=is_chain)] if points else []


def _shown(
    runs: Sequence[RunLog], prefix: Prefix
) -> Iterator[tuple[RunLog, Line, str, str, float]]:
    """Evaluations that have such metrics, with what to call them, colour and strength."""
    for index, run in enumerate(runs):
        lines = [line for line in run.evaluations if numbered(line, prefix(run))]
        if len(runs) > 1:
            for line in lines[-1:]:
                yield run, line, run.name, run_colour(index), 1.0
            continue
        chosen = [lines[place] for place in spread(len(lines), EARLIER)]
        for place, line in enumerate(chosen, start=1):
            yield run, line, f"step {line['step']:g}", "c1", 0.25 + 0.75 * place / len(chosen)


def _by_number(
    title: str, note: str, series: Sequence[Series], x_label: str, of: str
) -> Panel | None:
    if not series:
        return None
    last = max(x for line in series for x, _ in line.points)
    highest = max(y for line in series for _, y in line.points)
    y_label = of if of == "recall" else f"share of {of}"
    return series_panel(
        title, note, series, numbers_axis(x_label, last), share_axis(y_label, highest)
    )


def _bars(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Beside one another at each number."""
    x, y = plot_places(x_axis, y_axis)
    width = 0.8 * (x(2) - x(1)) / len(series)
    bars = []
    for index, line in enumerate(series):
        for number, share in line.points:
            left = x(number) + (index - len(series) / 2) * width
            bars.append(
                f'<rect class="{line.colour}" x="{left:.1f}" y="{y(share):.1f}" width="{width:.1f}"'
                f' height="{y(0) - y(share):.1f}" fill="currentColor" opacity="0.85">'
                f"<title>{text(line.name)}: {share:.1%} of passes emit {number:g}</title></rect>"
            )
    return bars


def _cells(columns: Sequence[tuple[float, Points]], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Each as wide as half the way to its neighbours, the outer ones symmetric."""
    x, y = plot_places(x_axis, y_axis)
    steps = [step for step, _ in columns]
    inner = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    edges = [max(2 * steps[0] - inner[0], 0.0), *inner, 2 * steps[-1] - inner[-1]]
    height = y(1) - y(2)
    most = max(share for _, shares in columns for _, share in shares)
    right = x(x_axis.high)
    return [
        f'<rect class="c1" x="{x(low):.1f}" y="{y(number) - height / 2:.1f}" width="{min(x(high), right) - x(low):.1f}"'
        f' height="{height:.1f}" fill="currentColor" opacity="{share / most:.2f}">'
        f"<title>{share:.1%} of passes emit {number:g} at step {step:g}</title></rect>"
        for (step, shares), (low, high) in zip(columns, itertools.pairwise(edges), strict=True)
        for number, share in shares
        if share > 0
    ]
