"""The model card's numbers: acceptance lengths of this very checkpoint, from the run's own evaluation/report.json.

A number stands there only with how it was measured: how many prompts, at which temperature, in replay or live, with its 95 %
bootstrap interval. Every budget that was evaluated is shown, none is picked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from export.markdown import table

ALL_TASKS = "all"
Row = Mapping[str, Any]

MEANINGS = {
    "plain": "the target alone",
    "chain": "the drafter's first choice of every slot",
    "chain_rejection": "a drawn token a slot, accepted with probability min(1, p/q)",
    "tree": "the likeliest prefixes, as many as the budget",
    "tree_spine": "the chain, then the likeliest other prefixes, as many as the budget in all",
    "tree_cost": "the likeliest prefixes while they paid by the costs of the evaluating machine, at most the budget",
}


def headline(report: Mapping[str, Any]) -> str | None:
    """One sentence: the chain and the largest tree on all held-out prompts, by replay; None if either is missing."""
    rows = _rows(report, ALL_TASKS, "replay")
    chains = [row for row in rows if row["acceptor"] == "chain"]
    trees = [row for row in rows if row["acceptor"] == "tree"]
    if not chains or not trees:
        return None
    chain, tree = chains[0], max(trees, key=lambda row: row["budget"])
    return (
        f"On {chain['num_prompts']} held-out prompts{_at(chain['temperature'])} a verify pass emits "
        f"{chain['acceptance_macro']:.2f} tokens when the chain is verified and {tree['acceptance_macro']:.2f} with a draft "
        f"tree of {tree['budget']} nodes."
    )


def acceptance(report: Mapping[str, Any]) -> str:
    """What an acceptance length is, then the tables."""
    parts = [
        "Tokens a verify pass emits: accepted draft tokens and the bonus token, mean over a prompt's passes, then over prompts "
        "(macro); `micro` is the mean over all passes. No training prompt is among them. Intervals are 95 % bootstrap intervals "
        "over prompts.",
    ]
    replayed, live = (_rows(report, ALL_TASKS, mode) for mode in ("replay", "live"))
    if replayed or live:
        parts.append(_meanings([*replayed, *live]))
    if replayed:
        parts.append(
            "**Replay** of the target's recorded responses, every budget:\n\n" + _overall(replayed)
        )
    tasks = _by_task(report)
    if tasks:
        parts.append("By task (macro):\n\n" + tasks)
    if live:
        dtype = report["facts"]["live dtype"]
        parts.append(f"**Live** decoding in {dtype}:\n\n" + _overall(live))
        parts.append(_lossless(report["lossless"], dtype))
    return "\n\n".join(parts)


def _meanings(rows: Sequence[Row]) -> str:
    """What is verified in a pass, for each acceptor that the tables name."""
    named = dict.fromkeys(row["acceptor"] for row in rows)
    return "Verified in a pass: " + "; ".join(f"`{n}`: {MEANINGS[n]}" for n in named) + "."


def _rows(report: Mapping[str, Any], task: str, mode: str) -> list[Row]:
    return [
        row
        for row in report["rows"]
        if row["task"] == task and row["mode"] == mode and row["acceptance_macro"] is not None
    ]


def _overall(rows: Sequence[Row]) -> str:
    head = ["acceptor", "budget", "temperature", "prompts", "tokens a pass", "95 %", "micro"]
    cells = [
        [
            row["acceptor"],
            "" if row["budget"] is None else str(row["budget"]),
            "as recorded" if row["temperature"] is None else f"{row['temperature']:g}",
            str(row["num_prompts"]),
            f"{row['acceptance_macro']:.3f}",
            "one prompt"
            if row["ci95"] is None
            else f"{row['ci95'][0]:.3f} to {row['ci95'][1]:.3f}",
            f"{row['acceptance_micro']:.3f}",
        ]
        for row in rows
    ]
    return table(head, cells)


def _by_task(report: Mapping[str, Any]) -> str | None:
    """A line a task, a column an acceptor and budget; None if there is one task only."""
    names = [row["task"] for row in report["rows"] if row["mode"] == "replay"]
    tasks = [task for task in dict.fromkeys(names) if task != ALL_TASKS]
    if len(tasks) < 2:
        return None
    lines = {task: {_name(row): row for row in _rows(report, task, "replay")} for task in tasks}
    columns = list(dict.fromkeys(name for line in lines.values() for name in line))
    cells = [
        [task, _num_prompts(line)]
        + [f"{line[name]['acceptance_macro']:.2f}" if name in line else "" for name in columns]
        for task, line in lines.items()
    ]
    return table(["task", "prompts", *columns], cells)


def _num_prompts(line: Mapping[str, Row]) -> str:
    """The same for every acceptor: replay reads the same rows."""
    return str(next(iter(line.values()))["num_prompts"]) if line else "0"


def _name(row: Row) -> str:
    name = row["acceptor"] if row["budget"] is None else f"{row['acceptor']} {row['budget']}"
    return f"{name}{_at(row['temperature'])}" if row["temperature"] else name


def _at(temperature: float | None) -> str:
    return "" if temperature is None else f" at temperature {temperature:g}"


def _lossless(found: Mapping[str, Any], dtype: str) -> str:
    ties = (
        "" if dtype == "float32" else f" In {dtype} two tokens may tie; float32 has no such case."
    )
    return (
        f"Greedy output equals the target's own, token for token, on {found['num_equal']} of {found['num_prompts']} prompts "
        f"decoded live.{ties}"
    )
