"""The report's charts, from the rows of report.json and the training log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.charts import (
    Axis,
    Series,
    doubling_axis,
    line_chart,
    linear_axis,
    stacked_bars,
)
from evaluation.decode import STAGES

CHAIN_COLOUR, LIVE_COLOUR = "#c2410c", "#1d4ed8"
TREE_COLOURS = ("#99d5cd", "#5bb8ad", "#2a9d8f", "#1b7f78", "#0f5f5c", "#0a4443", "#062c2c")
STAGE_COLOURS: Mapping[str, str] = dict(
    zip(STAGES, ("#0f766e", "#84b6f4", "#1d4ed8", "#f59e0b", "#94a3b8"), strict=True)
)


def acceptance_by_budget(replay: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]) -> str:
    """The chain as a level line, the tree over its budgets, both with intervals; greedy live decoding as dots."""
    trees = sorted((row for row in replay if row["acceptor"] == "tree"), key=lambda r: r["budget"])
    budgets = [float(row["budget"]) for row in trees]
    chain = next(row for row in replay if row["acceptor"] == "chain")
    ends = [budgets[0], budgets[-1]]
    dots = [row for row in live if row["acceptor"] == "tree" and row["temperature"] == 0]
    series = [
        Series(
            "chain",
            [(x, chain["acceptance_macro"]) for x in ends],
            CHAIN_COLOUR,
            [tuple(chain["ci95"])] * 2,
            is_dashed=True,
            has_markers=False,
        ),
        Series(
            "tree",
            [(float(row["budget"]), row["acceptance_macro"]) for row in trees],
            TREE_COLOURS[3],
            [tuple(row["ci95"]) for row in trees],
        ),
    ]
    if dots:
        points = [(float(row["budget"]), row["acceptance_macro"]) for row in dots]
        series.append(Series("tree, live (greedy)", points, LIVE_COLOUR, has_line=False))
    heights = [y for line in series for _, y in line.points] + [
        y for line in series for pair in line.band for y in pair
    ]
    return line_chart(
        series,
        doubling_axis("tree budget (nodes)", budgets),
        linear_axis("acceptance length", [1.0, *heights]),
    )


def survival_chart(survival: Sequence[dict[str, Any]]) -> str:
    series = []
    for index, row in enumerate(survival):
        name = row["acceptor"] if row["budget"] is None else f"{row['acceptor']} {row['budget']}"
        colour = CHAIN_COLOUR if row["budget"] is None else TREE_COLOURS[min(index - 1, 6)]
        points = _by_slot(row["share"])
        series.append(Series(name, points, colour, is_dashed=row["budget"] is None))
    return line_chart(
        series, _slots("depth (tokens drafted)", series), _up_to("share of anchors", series)
    )


def recall_chart(recall: Sequence[dict[str, Any]]) -> str:
    series = [
        Series(f"top {row['k']}", _by_slot(row["share"]), TREE_COLOURS[2 * index])
        for index, row in enumerate(recall)
    ]
    return line_chart(series, _slots("slot", series), _up_to("recall", series))


def calibration_chart(nodes: Sequence[dict[str, Any]]) -> str:
    points = [(row["predicted"], row["realised"]) for row in nodes]
    series = [
        Series("perfect", [(0, 0), (1, 1)], "#94a3b8", is_dashed=True, has_markers=False),
        Series("drafter", points, TREE_COLOURS[3]),
    ]
    return line_chart(series, _share_axis("path probability"), _share_axis("share that was right"))


def stage_chart(live: Sequence[dict[str, Any]]) -> str:
    rows = []
    for row in live:
        name = row["acceptor"] if row["budget"] is None else f"{row['acceptor']} {row['budget']}"
        rows.append((f"{name}, T={row['temperature']:g}", row["stage_share"]))
    return stacked_bars(rows, STAGE_COLOURS)


def training_charts(logs_folder: Path) -> list[tuple[str, str, str]]:
    """(title, note, chart) of the training log, nothing where there is none."""
    path = logs_folder / "train.jsonl"
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    charts = []
    loss = _curve(lines, "train/loss")
    if len(loss) > 1:
        series = [Series("train/loss", loss, TREE_COLOURS[3], has_markers=False)]
        charts.append(
            ("Training loss", "Nats a slot, weighted as it was trained.", _curves(series, "nats"))
        )
    names = sorted({name for line in lines for name in line if name.startswith("validation/") and "acceptance" in name}, key=_budget_of)  # fmt: skip
    curves = [(name, _curve(lines, name)) for name in names]
    series = [
        Series(
            name.removeprefix("validation/").replace("_acceptance", "").replace("_", " "),
            points,
            CHAIN_COLOUR if "chain" in name else TREE_COLOURS[min(max(index - 1, 0), 6)],
            is_dashed="chain" in name,
        )
        for index, (name, points) in enumerate(curves)
        if points
    ]
    if series:
        note = "Acceptance length on validation rows, by replay, during training."
        charts.append(("Acceptance while training", note, _curves(series, "acceptance length")))
    return charts


def _curves(series: Sequence[Series], label: str) -> str:
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    return line_chart(
        series, linear_axis("optimizer step", xs, from_zero=True), linear_axis(label, ys)
    )


def _curve(lines: Sequence[dict[str, float]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def _budget_of(name: str) -> int:
    """Sorts the chain before the trees, and those by budget."""
    tail = name.rsplit("_", 1)[-1]
    return int(tail) if tail.isdigit() else 0


def _by_slot(shares: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(slot), share) for slot, share in enumerate(shares, start=1)]


def _slots(label: str, series: Sequence[Series]) -> Axis:
    last = max(x for line in series for x, _ in line.points)
    return Axis(label, 0.8, last + 0.2, [float(slot) for slot in range(1, int(last) + 1)])


def _up_to(label: str, series: Sequence[Series]) -> Axis:
    """From zero to the largest share."""
    return linear_axis(label, [y for line in series for _, y in line.points], from_zero=True)


def _share_axis(label: str) -> Axis:
    return Axis(label, 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
