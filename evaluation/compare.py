"""`./launch.sh compare A B`: is drafter B better than drafter A? Prompt by prompt, with paired intervals.

Writes compare-<A's fingerprint>.html and .json beside B's report, and prints the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.command import StageParser, run_command
from common.files import write_json
from evaluation.html import card, facts, heading, section, table, text, write_html
from evaluation.pairing import compare_evaluations, read_evaluation
from evaluation.plots import Palette, acceptor_name, by_budget
from evaluation.prompt_records import ALL_TASKS
from evaluation.summary import aligned

VERDICT_KINDS = {"better": "good", "worse": "bad", "no difference shown": ""}
HEAD = ["mode", "T", "acceptor", "prompts", "A", "B", "B - A [95 %]", "relative [95 %]"]
NOTE = (
    "Tokens a verify pass, macro means over the same prompts; the intervals are of the paired difference (bootstrap over "
    "prompts). Each stands for itself: of twenty equal pairs one is expected outside."
)


def main(options: argparse.Namespace) -> None:
    first, second = read_evaluation(options.first), read_evaluation(options.second)
    result = compare_evaluations(first, second)
    folder = options.output or second.path.parent
    page = folder / f"compare-{result['first']['drafter'][:8]}.html"
    write_json(page.with_suffix(".json"), result)
    write_comparison(page, result)
    sys.stdout.write("\n".join([*comparison_lines(result), "", f"page: {page}"]) + "\n")


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """The console's table: all prompts together."""
    rows = [[*HEAD, "better/worse", "B is"]]
    for row in _of_all(result):
        spread = _signed(row["difference"], row["ci95"], ".3f")
        relative = _signed(row["relative"], row["relative_ci95"], ".1%")
        rows.append([*_named(row), spread, relative, f"{row['num_better']}/{row['num_worse']}"])
        rows[-1].append(row["verdict"])
    names = [
        f"{letter}: {result[key]['name']}" for letter, key in (("A", "first"), ("B", "second"))
    ]
    return [*names, "", *aligned(rows), *_left_out(result), *result["notes"]]


def write_comparison(path: Path, result: Mapping[str, Any]) -> None:
    """The page; `result` is compare.json's content."""
    first, second = result["first"], result["second"]
    lines = [row for row in _of_all(result) if row["mode"] == "replay"] or _of_all(result)
    same = [row for row in lines if row["temperature"] == lines[0]["temperature"]]
    chart = by_budget("B - A, tokens a pass", same, [], Palette(same), "difference", 0.0)
    body = [
        heading("Is B the better draft tree?", f"A: {first['name']} · B: {second['name']}"),
        f'<div class="cards">{"".join(_card(row) for row in _headlines(lines))}</div>',
        '<div class="grid">',
        section("Every acceptor", [NOTE, *result["notes"]], _table(_of_all(result)), "wide"),
        section("Difference by tree budget", ["Above 0 B is better."], chart),
        section("By task", ["The largest budget of each acceptor."], _task_table(result)),
        *(section(letter, [], _facts(side)) for letter, side in (("A", first), ("B", second))),
        "</div>",
    ]
    write_html(path, "comparison of two drafters", "".join(body))


def _card(row: Mapping[str, Any]) -> str:
    below = f"{_signed(row['difference'], row['ci95'], '.2f')} tokens a pass, {row['num_prompts']} prompts"
    title = f"{acceptor_name(row)} ({row['mode']}): {row['verdict']}"
    return card(title, f"{row['relative']:+.1%}", below, VERDICT_KINDS[row["verdict"]])


def _headlines(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each acceptor's largest budget."""
    largest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        known = largest.get(row["acceptor"])
        if known is None or (row["budget"] or 0) > (known["budget"] or 0):
            largest[row["acceptor"]] = row
    return list(largest.values())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        [*HEAD, "prompts better / equal / worse", "B is"],
        [
            [*(text(cell) for cell in _named(row)), *_differences(row), _counts(row), _verdict(row)]
            for row in rows
        ],
    )


def _task_table(result: Mapping[str, Any]) -> str:
    kinds = {_kind(row) for row in _headlines(_of_all(result))}
    rows = [r for r in result["rows"] if r["task"] != ALL_TASKS and _kind(r) in kinds]
    return table(
        ["task", "acceptor", "prompts", "B - A [95 %]", "relative [95 %]", "B is"],
        [
            [
                *(
                    text(cell)
                    for cell in (row["task"], acceptor_name(row), str(row["num_prompts"]))
                ),
                *_differences(row),
                _verdict(row),
            ]
            for row in rows
        ],
    )


def _differences(row: Mapping[str, Any]) -> list[str]:
    return [
        _small(row["difference"], row["ci95"], ".3f"),
        _small(row["relative"], row["relative_ci95"], ".1%"),
    ]


def _small(value: float, ends: Sequence[float] | None, form: str) -> str:
    """Markup, with signs: an interval may lie on both sides of 0."""
    interval = "" if ends is None else f" <small>{ends[0]:+{form}} to {ends[1]:+{form}}</small>"
    return f"{value:+{form}}{interval}"


def _counts(row: Mapping[str, Any]) -> str:
    equal = row["num_prompts"] - row["num_better"] - row["num_worse"]
    return f"{row['num_better']} / {equal} / {row['num_worse']}"


def _verdict(row: Mapping[str, Any]) -> str:
    return f'<b class="{VERDICT_KINDS[row["verdict"]]}">{row["verdict"]}</b>'


def _named(row: Mapping[str, Any]) -> list[str]:
    temperature = "as recorded" if row["temperature"] is None else f"{row['temperature']:g}"
    means = [f"{row[side]:.3f}" for side in ("first", "second")]
    return [row["mode"], temperature, acceptor_name(row), str(row["num_prompts"]), *means]


def _signed(value: float, ends: Sequence[float] | None, form: str) -> str:
    interval = "" if ends is None else f" [{ends[0]:+{form}}, {ends[1]:+{form}}]"
    return f"{value:+{form}}{interval}"


def _facts(side: Mapping[str, Any]) -> str:
    return facts(
        [*side["facts"].items(), ("fingerprint", side["drafter"][:16]), ("report", side["report"])]
    )


def _left_out(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for letter, rows in (("A", result["only_first"]), ("B", result["only_second"])):
        names = [f"{acceptor_name(row)} ({row['mode']})" for row in rows]
        if names:
            lines.append(f"only in {letter}: {', '.join(names)}")
    return lines


def _of_all(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["task"] == ALL_TASKS]


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["mode"], row["temperature"], row["acceptor"], row["budget"]


if __name__ == "__main__":
    parser = StageParser(
        prog="./launch.sh compare",
        description="Two drafters on the same prompts, paired: does B differ from A?",
    )
    where = "a run's folder, its evaluation folder, or a report.json"
    parser.add_argument("first", type=Path, metavar="A", help=where)
    parser.add_argument("second", type=Path, metavar="B", help=where)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: beside B's report")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    run_command(parser, main)
