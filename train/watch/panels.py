"""The charts of a run, or of several laid over each other: each a list of SVG elements, for the page and for the picture.

A run alone shows its quantities side by side; several runs show one quantity a chart, a colour a run. Metrics that no chart
here knows get one of their own, so whatever is logged is seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evaluation.charts import Axis, Series, keys, line_parts, linear_axis
from train.tracking import METRICS, metric_pattern
from train.watch.axes import log_axis
from train.watch.log import Points, RunLog
from train.watch.thinning import thinned

COLOURS = ("c1", "c0", "c2", "c3", "c4", "c5", "c6")
MARKED = 40
"""A curve of more points has no markers."""


@dataclass(frozen=True)
class Panel:
    """A chart and what is said of it."""

    title: str
    note: str
    parts: list[str]
    legend: list[tuple[str, str, float]]
    """Name, class and opacity."""
    names: frozenset[str] = field(default_factory=frozenset)
    """The metrics it shows."""


@dataclass(frozen=True)
class Curves:
    """Metrics that one run shows together, over steps."""

    title: str
    note: str
    unit: str
    patterns: tuple[str, ...]
    """Of METRICS."""
    is_log: bool = False


HEADLINES = (
    Curves(
        "Acceptance length on validation rows",
        "Tokens a verify pass emits, by replay, macro mean. The stronger a tree's colour, the larger its budget.",
        "tokens a pass",
        ("validation/chain_acceptance", "validation/tree_acceptance_*"),
    ),
    Curves(
        "Training loss",
        "Nats a slot, averaged with the slot weights. Losses of other weights are not comparable.",
        "nats",
        ("train/loss",),
        is_log=True,
    ),
)
"""What a run is judged by."""
DETAILS = (
    Curves(
        "Drafted ahead in training blocks",
        "Leading slots of a block that are right, at random anchors: how far chain and tree would get. No acceptance length.",
        "slots",
        ("train/chain_hits", "train/tree_hits"),
    ),
    Curves("Learning rate", METRICS["train/learning_rate"], "", ("train/learning_rate",)),
    Curves(
        "Gradient norm",
        "Before clipping, of the last step of each line.",
        "norm",
        ("train/grad_norm",),
        is_log=True,
    ),
    Curves(
        "Weights",
        "Mean weight of a slot; and the share of the recipe's loss, the rest being decayed cross-entropy.",
        "weight, share",
        ("train/mean_weight", "train/loss_share"),
    ),
    Curves("Speed", METRICS["train/tokens_per_s"], "tokens/s", ("train/tokens_per_s",)),
    Curves(
        "Calibration while training",
        "Expected calibration error of path probabilities over the nodes of the largest tree; 0 is true.",
        "error",
        ("calibration/ece",),
    ),
    Curves(
        "Confidence while training",
        "Accepted tokens that the drafter expects over those it gets, at every anchor; above 1 is over-confident.",
        "ratio",
        ("calibration/chain_ratio", "calibration/tree_ratio_*"),
    ),
)
SHAPES = (
    "survival/chain_depth_*",
    "survival/tree_*_depth_*",
    "recall/top_*_slot_*",
    "calibration/expected_bin_*",
    "calibration/right_bin_*",
    "walk/chain_emits_*",
    "walk/tree_*_emits_*",
)
"""Shown by train/watch/shapes.py, not over steps."""


def curve_panels(runs: Sequence[RunLog], specs: Sequence[Curves]) -> list[Panel]:
    """Of `specs`, those that some run has logged."""
    panels = []
    for spec in specs:
        names = _names_of(runs, spec.patterns)
        groups = [names] if len(runs) == 1 else [[name] for name in names]
        panels += [panel for group in groups if (panel := _curve_panel(runs, spec, group))]
    return panels


def other_panels(runs: Sequence[RunLog]) -> list[Panel]:
    """A chart for each metric that no other chart shows."""
    known = {*SHAPES, *(pattern for spec in (*HEADLINES, *DETAILS) for pattern in spec.patterns)}
    names = sorted(
        {name for run in runs for name in run.names if metric_pattern(name) not in known}
    )
    specs = [Curves(n, METRICS.get(metric_pattern(n), "no known metric"), "", (n,)) for n in names]
    return curve_panels(runs, specs)


def series_panel(
    title: str, note: str, series: Sequence[Series], x_axis: Axis, y_axis: Axis, *names: str
) -> Panel:
    return Panel(title, note, line_parts(series, x_axis, y_axis), keys(series), frozenset(names))


def run_colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _curve_panel(runs: Sequence[RunLog], spec: Curves, names: Sequence[str]) -> Panel | None:
    if len(runs) == 1:
        series = _alone(runs[0], names)
        title = spec.title
        if len(series) == 1:  # the title says what it is
            series = [replace(series[0], name="", hint=series[0].name)]
    else:
        series = _overlaid(runs, names[0])
        title = spec.title if len(spec.patterns) == 1 else f"{spec.title}: {label(names[0])}"
    if not series:
        return None
    ys = [y for line in series for _, y in line.points] + [
        y for line in series for ends in line.band for y in ends
    ]
    is_log = spec.is_log and min(ys) > 0
    y_axis = log_axis(spec.unit, ys) if is_log else linear_axis(spec.unit, ys)
    return series_panel(title, spec.note, series, steps_axis(series), y_axis, *names)


def steps_axis(series: Sequence[Series]) -> Axis:
    xs = [x for line in series for x, _ in line.points]
    return linear_axis("optimizer step", xs, from_zero=True)


def _alone(run: RunLog, names: Sequence[str]) -> list[Series]:
    """A line a metric: the chain dashed, trees by budget in one colour, anything else a colour each."""
    trees = [name for name in names if _is_tree(name)]
    others = [name for name in names if not _is_tree(name)]
    series = []
    for name in names:
        is_tree = _is_tree(name)
        is_chain = bool(trees) and not is_tree
        colour = "c1" if is_tree or not trees else "c0"
        if not trees:
            colour = run_colour(others.index(name))
        strength = 0.3 + 0.7 * (trees.index(name) + 1) / len(trees) if is_tree else 1.0
        series.append(_line(run.curve(name), label(name), colour, strength, is_chain))
    return [line for line in series if line.points]


def run_series(
    index: int,
    name: str,
    points: Points,
    band: Sequence[tuple[float, float]] = (),
    has_markers: bool = True,
) -> Series:
    """The line of the run at `index` of several: where the colours begin again, dashed, and called so."""
    is_dashed = index >= len(COLOURS)
    shown = f"{name} (dashed)" if is_dashed else name
    colour = run_colour(index)
    return Series(shown, points, colour, list(band), is_dashed=is_dashed, has_markers=has_markers)


def _overlaid(runs: Sequence[RunLog], name: str) -> list[Series]:
    series = []
    for index, run in enumerate(runs):
        points = run.curve(name)
        if points:
            series.append(run_series(index, run.name, *thinned(points), len(points) <= MARKED))
    return series


def _line(points: Points, name: str, colour: str, strength: float, is_dashed: bool) -> Series:
    """Few points with markers; many thinned, with the band between their extremes."""
    means, band = thinned(points)
    return Series(name, means, colour, band, strength, is_dashed, has_markers=len(points) <= MARKED)


def _names_of(runs: Sequence[RunLog], patterns: Sequence[str]) -> list[str]:
    """The logged metrics of these patterns, in their order and by number."""
    logged = {name for run in runs for name in run.names}
    return [
        name
        for pattern in patterns
        for name in sorted((n for n in logged if pattern in (n, metric_pattern(n))), key=_by_number)
    ]


def _by_number(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))


def _is_tree(name: str) -> bool:
    return metric_pattern(name) in ("validation/tree_acceptance_*", "calibration/tree_ratio_*")


def label(name: str) -> str:
    """`validation/tree_acceptance_64` as `tree 64`; `train/chain_hits` as `chain hits`."""
    quantity = name.partition("/")[2] or name
    for word in ("_acceptance", "_ratio"):
        quantity = quantity.replace(word, "")
    return quantity.replace("_", " ")
