"""The cards on top of the page: what a person decides by in a minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.html import card
from evaluation.plots import acceptor_name
from evaluation.prompt_records import ALL_TASKS
from evaluation.speed import measured_rows

TRUE_WITHIN = 0.1
"""The drafter's expectation counts as true when it is within 10 % of what happens."""


MIN_PROMPTS = 5
"""No interval of fewer prompts covers what it says."""


def select(report: Mapping[str, Any], mode: str, task: str = ALL_TASKS) -> list[dict[str, Any]]:
    """Rows of one mode and task that have passes."""
    rows = [row for row in report["rows"] if row["mode"] == mode and row["task"] == task]
    return [row for row in rows if row["num_passes"]]


def cards(report: Mapping[str, Any]) -> str:
    found = [
        _chain(report),
        _longest(report),
        _fastest(report),
        _lossless(report),
        _parity(report),
        _confidence(report),
        _tasks(report),
    ]
    return f'<div class="cards">{"".join(found)}</div>'


def _chain(report: Mapping[str, Any]) -> str:
    for row in _headline_rows(report):
        if row["acceptor"] == "chain":
            return card("Chain", *_length(row))
    return ""


def _longest(report: Mapping[str, Any]) -> str:
    rows = [row for row in _headline_rows(report) if row["budget"] is not None]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row["acceptance_macro"])
    gains = {_kind(row): row for row in report["gain"]}
    number, below = _length(best)
    gain = gains.get(_kind(best))
    if gain and gain["relative_ci95"]:
        low, high = gain["relative_ci95"]
        below += f"; {gain['relative']:+.0%} over the chain ({low:+.0%} to {high:+.0%})"
    return card(f"Longest: {acceptor_name(best)}", number, below)


def _length(row: Mapping[str, Any]) -> tuple[str, str]:
    interval = f", {row['ci95'][0]:.2f} to {row['ci95'][1]:.2f}" if row["ci95"] else ""
    below = f"tokens a pass{interval} ({row['mode']}, {row['num_prompts']} prompts)"
    return f"{row['acceptance_macro']:.2f}", below


def _fastest(report: Mapping[str, Any]) -> str:
    """By the cost model, which knows every budget; without one, by live decoding."""
    measured = [r for r in measured_rows(select(report, "live")) if r["acceptor"] != "plain"]
    if report["modelled"]:
        best = max(report["modelled"], key=lambda row: row["speedup"])
        same = [r["speedup"] for r in measured if acceptor_name(r) == acceptor_name(best)]
        below = (
            f"plain decoding, modelled; measured {same[0]:.2f}x"
            if same
            else "plain decoding, modelled"
        )
    elif measured:
        best = max(measured, key=lambda row: row["speedup"])
        below = f"plain decoding, measured at T={best['temperature']:g}"
    else:
        return ""
    kind = "good" if best["speedup"] > 1 else "warn"
    if best["speedup"] <= 1:
        below += ": drafting does not pay on this machine"
    return card(f"Fastest: {acceptor_name(best)}", f"{best['speedup']:.2f}x", below, kind)


def _lossless(report: Mapping[str, Any]) -> str:
    found, parity = report["lossless"], report["parity"]
    if not found["num_prompts"]:
        return card("Lossless", "not checked", "no greedy live decoding ran", "warn")
    equal, total = found["num_equal"], found["num_prompts"]
    if equal < total:
        return card("Lossless: NO", f"{equal} of {total}", "prompts equal; see Checks below", "bad")
    below = "prompts: every acceptor gave plain greedy decoding's tokens"
    if parity["num_passes"] and parity["num_equal"] == parity["num_passes"]:
        below += f"; all {parity['num_passes']} passes are as replay predicts"
    return card("Lossless: yes", f"{equal} of {total}", below, "good")


def _parity(report: Mapping[str, Any]) -> str:
    """Only where live decoding and replay disagree."""
    found = report["parity"]
    equal, total = found["num_equal"], found["num_passes"]
    if equal == total:
        return ""
    real = [item for item in found["differing"] if not item["is_near_tie"]]
    below = f"live passes are as replay predicts; {len(real)} of the others are no near-tie"
    return card("Replay is live", f"{equal} of {total}", below, "bad" if real else "warn")


def _confidence(report: Mapping[str, Any]) -> str:
    """Of the largest budget: what it expects to be accepted over what is."""
    rows = [r for r in report["calibration"]["accepted_per_anchor"] if r["ratio"] is not None]
    if not rows:
        return ""
    row = max(rows, key=lambda row: row["budget"] or 0)
    ratio, ece = row["ratio"], report["calibration"]["ece"]
    is_true = abs(ratio - 1) <= TRUE_WITHIN
    title = "Calibrated" if is_true else "Over-confident" if ratio > 1 else "Under-confident"
    below = (
        f"{acceptor_name(row)} expects {row['predicted']:.2f} accepted tokens an anchor, "
        f"{row['realised']:.2f} are; node ECE {ece:.4f}"
    )
    if not is_true and report["calibration"]["unfitted"] is None:
        below += "; evaluation.drafter_temperature=fit may help"
    return card(title, f"{ratio - 1:+.0%}", below, "good" if is_true else "warn")


def _tasks(report: Mapping[str, Any]) -> str:
    weak = weak_tasks(report)
    if weak is None:
        return ""
    if not weak:
        return card("Weak tasks", "none", "no task's interval is below the mean of all", "good")
    below = ", ".join(f"{row['task']} {row['acceptance_macro']:.2f}" for row in weak)
    return card("Weak tasks", str(len(weak)), f"wholly below the mean: {below}", "warn")


def weak_tasks(report: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Tasks whose whole interval lies below the mean of all prompts, for the largest budget; None for a single task.

    Tasks of fewer than MIN_PROMPTS prompts are not judged.
    """
    rows = _headline_rows(report)
    trees = [row for row in rows if row["budget"] is not None]
    if not trees:
        return None
    best = max(trees, key=lambda row: row["budget"])
    tasks = [
        row
        for row in report["rows"]
        if row["task"] != ALL_TASKS and _kind(row) == _kind(best) and row["num_passes"]
    ]
    if len(tasks) < 2:
        return None
    mean = best["acceptance_macro"]
    judged = [row for row in tasks if row["num_prompts"] >= MIN_PROMPTS and row["ci95"]]
    return [row for row in judged if row["ci95"][1] < mean]


def _headline_rows(report: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Replay's, which cover most prompts and every budget; live ones where nothing was replayed."""
    return select(report, "replay") or select(report, "live")


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["mode"], row["temperature"], row["acceptor"], row["budget"]
