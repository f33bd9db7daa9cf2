"""The page's tables, from report.json's content. No acceptor is known by name here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.headline import select, weak_tasks
from evaluation.html import table, text, with_interval
from evaluation.plots import acceptor_name, milliseconds
from evaluation.speed import measured_rows


def acceptor_table(report: Mapping[str, Any]) -> str:
    """A row an acceptor, budget and temperature: lengths in replay and live, nodes, milliseconds and speeds."""
    replay = {_key(row): row for row in select(report, "replay")}
    live = {_key(row): row for row in select(report, "live")}
    same = {acceptor_name(row): row["replay"] for row in report["side_by_side"]}
    nodes = {acceptor_name(r): r["num_nodes"] for r in report["calibration"]["accepted_per_anchor"]}
    measured = {_key(row): row["speedup"] for row in measured_rows(list(live.values()))}
    modelled = {acceptor_name(row): row for row in report["modelled"]}
    rows = []
    keys = dict.fromkeys([*replay, *live])
    for key in sorted(keys, key=lambda key: key[0] != "plain"):
        name, temperature = key
        is_greedy_live = key in live and temperature == 0
        model = modelled.get(name) if key in replay else None
        rows.append(
            [
                text(name),
                "as recorded" if temperature is None else f"{temperature:g}",
                f"{nodes[name]:.1f}" if key in replay else "",
                _length(replay.get(key)),
                _length(live.get(key)),
                f"{same[name]:.2f}" if is_greedy_live and name in same else "",
                _pass_ms(live.get(key)),
                f"{live[key]['tokens_per_s']:.1f}" if key in live else "",
                f"{measured[key]:.2f}&times;" if key in measured else "",
            ]
        )
        if modelled:
            rows[-1] += ["", ""]
        if model is not None:
            rows[-1][-2:] = [
                milliseconds(model["round_ms"]),
                with_interval(model["speedup"], model["ci95"]),
            ]
    head = ["acceptor", "T", "nodes", "replay", "live", "same records", "ms a pass", "tokens/s"]
    head.append("over plain")
    return table([*head, *(["ms, modelled", "over plain, modelled"] if modelled else [])], rows)


def task_table(report: Mapping[str, Any]) -> str:
    """A row an acceptor, a column a task."""
    mode = "replay" if select(report, "replay") else "live"
    tasks = list(dict.fromkeys(row["task"] for row in report["rows"] if row["mode"] == mode))
    weak = {row["task"] for row in weak_tasks(report) or []}
    found = {task: {_key(row): row for row in select(report, mode, task)} for task in tasks}
    tasks = [task for task in tasks if found[task]]
    prompts = [str(max(row["num_prompts"] for row in found[task].values())) for task in tasks]
    rows = [["prompts", *prompts]]
    for key in found[tasks[0]]:
        rows.append([text(key[0]), *(_length(found[task].get(key)) for task in tasks)])
    return table(["acceptor", *(f"{task}{' ▼' if task in weak else ''}" for task in tasks)], rows)


def calibration_table(calibration: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Accepted tokens an anchor, expected and real; with a fit, the same before it."""
    head = ["acceptor", "expected", "accepted", "ratio"]
    rows = [
        [text(acceptor_name(row)), f"{row['predicted']:.2f}", f"{row['realised']:.2f}", _ratio(row)]
        for row in calibration["accepted_per_anchor"]
    ]
    if before is not None:
        head += ["ratio before the fit"]
        for cells, row in zip(rows, before["accepted_per_anchor"], strict=True):
            cells.append(_ratio(row))
    return table(head, rows)


def _ratio(row: Mapping[str, Any]) -> str:
    return "" if row["ratio"] is None else with_interval(row["ratio"], row["ratio_ci95"])


def _length(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else with_interval(row["acceptance_macro"], row["ci95"])


def _pass_ms(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return milliseconds(1000 * row["acceptance_micro"] / row["tokens_per_s"])


def _key(row: Mapping[str, Any]) -> tuple[str, float | None]:
    return acceptor_name(row), row["temperature"]
