"""The report's charts, from report.json's content and the training log. No acceptor is known by name here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.step_log import read_step_log
from evaluation.charts import (
    Axis,
    Bar,
    Series,
    doubling_axis,
    line_chart,
    linear_axis,
    stacked_bars,
)

NUM_COLOURS = 7  # classes c0..c6 of the page; c7 is grey
GREY = "c7"
STAGE_COLOURS = ("c1", "c6", "c2", "c0", "c7")
"""In the order of the stages."""
CHILD_GROUPS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 16), (17, None))
"""Choices shown together, first and last, from 1."""


def acceptor_name(row: Mapping[str, Any]) -> str:
    """As tables show it: `chain`, `tree 64`."""
    return row["acceptor"] if row["budget"] is None else f"{row['acceptor']} {row['budget']}"


def milliseconds(value: float) -> str:
    """Three digits, and whole ones from 100 on."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


class Palette:
    """A colour an acceptor, in the order of the report; plain decoding is grey."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        names = dict.fromkeys(row["acceptor"] for row in rows)
        drafted = [name for name in names if name != "plain"]
        self._classes = {name: f"c{i % NUM_COLOURS}" for i, name in enumerate(drafted)}

    def of(self, row: Mapping[str, Any]) -> str:
        return self._classes.get(row["acceptor"], GREY)


def by_budget(
    title: str,
    lines: Sequence[Mapping[str, Any]],
    dots: Sequence[Mapping[str, Any]],
    palette: Palette,
    value: str,
    least: float,
) -> str:
    """`value` over the budget: a line an acceptor, level and dashed where it has no budget; `dots` hollow.

    Intervals are drawn where a row has `ci95`. `least` is on the axis in any case.
    """
    budgets = sorted({float(r["budget"]) for r in [*lines, *dots] if r["budget"] is not None})
    budgets = budgets or [1.0]
    series = [_over_budget(rows, budgets, palette, value) for rows in _families(lines)]
    series += [_dots(rows, palette, value) for rows in _families(dots) if rows[0]["budget"]]
    heights = [y for line in series for _, y in line.points]
    heights += [y for line in series for pair in line.band for y in pair]
    x_axis = doubling_axis("tree budget (nodes)", budgets)
    return line_chart(title, series, x_axis, linear_axis(title, [least, *heights]))


def _families(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows of one acceptor together, by budget."""
    names = dict.fromkeys(row["acceptor"] for row in rows)
    return [
        sorted((r for r in rows if r["acceptor"] == name), key=lambda r: r["budget"] or 0)
        for name in names
    ]


def _over_budget(
    rows: Sequence[Mapping[str, Any]], budgets: Sequence[float], palette: Palette, value: str
) -> Series:
    first, is_level = rows[0], rows[0]["budget"] is None
    if is_level:
        rows, places = [first, first], [budgets[0], budgets[-1]]
    else:
        places = [float(row["budget"]) for row in rows]
    has_band = all(row.get("ci95") for row in rows)
    return Series(
        first["acceptor"],
        [(place, row[value]) for place, row in zip(places, rows, strict=True)],
        palette.of(first),
        [tuple(row["ci95"]) for row in rows] if has_band else [],
        is_dashed=is_level,
        has_markers=not is_level,
    )


def _dots(rows: Sequence[Mapping[str, Any]], palette: Palette, value: str) -> Series:
    points = [(float(row["budget"]), row[value]) for row in rows]
    hint = f"{rows[0]['acceptor']}, live"
    return Series("", points, palette.of(rows[0]), has_line=False, is_hollow=True, hint=hint)


def survival_chart(survival: Sequence[Mapping[str, Any]], palette: Palette) -> str:
    """Of `telling` acceptors, fainter where the budget is smaller."""
    series = [
        Series(
            acceptor_name(row),
            _by_slot(row["share"]),
            palette.of(row),
            strength=strength,
            is_dashed=row["budget"] is None,
        )
        for row, strength in telling(survival)
    ]
    x_axis = _slots("depth (tokens drafted)", series)
    return line_chart("survival by depth", series, x_axis, _from_zero("share of anchors", series))


def telling(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """All budgets of the acceptor that has most of them, the largest of the others; and how strongly to draw each."""
    families = _families(rows)
    fullest = max(families, key=len, default=[])
    shown = []
    for family in families:
        members = family if family is fullest else family[-1:]
        shown += [(row, _strength(i, len(members))) for i, row in enumerate(members)]
    return shown


def recall_chart(recall: Sequence[Mapping[str, Any]]) -> str:
    series = [
        Series(
            f"top {row['k']}", _by_slot(row["share"]), "c1", strength=_strength(index, len(recall))
        )
        for index, row in enumerate(recall)
    ]
    return line_chart(
        "recall of each slot", series, _slots("slot", series), _from_zero("recall", series)
    )


def calibration_chart(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line a curve name; on the dashed line the drafter's probabilities are true."""
    series = [Series("true", [(0, 0), (1, 1)], GREY, is_dashed=True, has_markers=False)]
    series += [
        Series(
            name,
            [(row["predicted"], row["realised"]) for row in nodes],
            f"c{1 - index}",
            is_hollow=index > 0,
        )
        for index, (name, nodes) in enumerate(curves.items())
    ]
    axes = _share_axis("path probability"), _share_axis("share that was right")
    return line_chart("calibration of path probability", series, *axes)


def stage_chart(live: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds a pass, by stage."""
    bars = []
    for row in live:
        pass_ms = 1000 * row["acceptance_micro"] / row["tokens_per_s"]
        parts = {stage: share * pass_ms for stage, share in row["stage_share"].items()}
        name = f"{acceptor_name(row)}, T={row['temperature']:g}"
        bars.append(Bar(name, parts, f"{milliseconds(pass_ms)} ms"))
    stages = dict.fromkeys(stage for bar in bars for stage in bar.parts)
    colours = {stage: (STAGE_COLOURS[i % 5], 1.0) for i, stage in enumerate(stages)}
    return stacked_bars("milliseconds a pass", bars, colours, milliseconds)


def child_rank_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of `telling` acceptors in replay, and of the largest budgets decoded live."""
    colours = {
        _group_name(first, last): ("c1", _strength(len(CHILD_GROUPS) - index, len(CHILD_GROUPS)))
        for index, (first, last) in enumerate(CHILD_GROUPS)
    }
    modes = dict.fromkeys((row["mode"], row["temperature"]) for row in rows)
    shown = []
    for mode in modes:
        own = [row for row in rows if (row["mode"], row["temperature"]) == mode]
        families = _families(own)
        shown += [r for r, _ in telling(own)] if mode[0] == "replay" else [f[-1] for f in families]
    bars = [_child_rank_bar(row) for row in shown]
    return stacked_bars("choices taken", bars, colours, lambda share: f"{share:.0%}")


def _child_rank_bar(row: Mapping[str, Any]) -> Bar:
    parts = {
        _group_name(first, last): sum(row["share"][first - 1 : last])
        for first, last in CHILD_GROUPS
    }
    live = f", live T={row['temperature']:g}" if row["mode"] == "live" else ""
    return Bar(f"{acceptor_name(row)}{live}", parts, f"of {row['num_tokens']}")


def _group_name(first: int, last: int | None) -> str:
    if last is None:
        return f"choice {first} on"
    return f"choice {first}" if first == last else f"choices {first}-{last}"


def training_charts(logs_folder: Path) -> list[tuple[str, str, str]]:
    """(title, note, chart) of the training log, nothing where there is none."""
    path = logs_folder / "train.jsonl"
    if not path.is_file():
        return []
    lines = read_step_log(path)
    charts = []
    loss = _curve(lines, "train/loss")
    if len(loss) > 1:
        series = [Series("train/loss", loss, "c1", has_markers=False)]
        note = "Nats a slot, weighted as it was trained."
        charts.append(("Training loss", note, _curves("training loss", series, "nats")))
    series = _validation_curves(lines)
    if series:
        note = "Acceptance length on validation rows, by replay, during training."
        chart = _curves("acceptance while training", series, "acceptance length")
        charts.append(("Acceptance while training", note, chart))
    return charts


def _validation_curves(lines: Sequence[Mapping[str, float]]) -> list[Series]:
    logged = {name for line in lines for name in line}
    names = [n for n in logged if n.startswith("validation/") and "acceptance" in n]
    names.sort(key=lambda name: (_budget_of(name), name))
    num_trees = max(sum(_budget_of(name) > 0 for name in names), 1)
    return [
        Series(
            name.removeprefix("validation/").replace("_acceptance", "").replace("_", " "),
            points,
            "c1" if _budget_of(name) else "c0",
            strength=_strength(index - len(names) + num_trees, num_trees),
            is_dashed=not _budget_of(name),
        )
        for index, name in enumerate(names)
        if (points := _curve(lines, name))
    ]


def _curves(title: str, series: list[Series], label: str) -> str:
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    return line_chart(
        title, series, linear_axis("optimizer step", xs, from_zero=True), linear_axis(label, ys)
    )


def _curve(lines: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if name in line]


def _budget_of(name: str) -> int:
    """Sorts the chain before the trees, and those by budget."""
    tail = name.rsplit("_", 1)[-1]
    return int(tail) if tail.isdigit() else 0


def _strength(index: int, count: int) -> float:
    """0.3..1 over the members of a family, the last one strongest."""
    return 1.0 if count < 2 or index < 0 else 0.3 + 0.7 * min(index / (count - 1), 1.0)


def _by_slot(shares: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(slot), share) for slot, share in enumerate(shares, start=1)]


def _slots(label: str, series: Sequence[Series]) -> Axis:
    last = max((x for line in series for x, _ in line.points), default=1.0)
    return Axis(label, 0.8, last + 0.2, [float(slot) for slot in range(1, int(last) + 1)])


def _from_zero(label: str, series: Sequence[Series]) -> Axis:
    """To the largest share."""
    return linear_axis(label, [0.0, *(y for line in series for _, y in line.points)])


def _share_axis(label: str) -> Axis:
    return Axis(label, 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
