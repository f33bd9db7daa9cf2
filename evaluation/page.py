"""report.html: one self-contained page, light, with what a person would look at first on top."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from common.files import atomic_path
from evaluation.drawing import DrawnTree
from evaluation.plots import (
    acceptance_by_budget,
    calibration_chart,
    recall_chart,
    stage_chart,
    survival_chart,
    training_charts,
)
from evaluation.report import ALL_TASKS
from evaluation.tree_chart import tree_chart

MAX_TREES = 3

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a202c;
  background: #f4f6f9; margin: 0; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 4px; }
.sub { color: #4a5568; margin: 0 0 20px; } .note { color: #5b6678; font-size: 13px; margin: 0 0 10px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; margin-bottom: 16px; }
.card, section { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 16px 18px; }
.card b { display: block; font-size: 27px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: #4a5568; font-size: 13px; } .card.good b { color: #0f766e; } .card.bad b { color: #b91c1c; }
.grid { display: grid; grid-auto-flow: dense; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.wide { grid-column: 1 / -1; } @media (max-width: 900px) { .grid { grid-template-columns: minmax(0, 1fr); } }
svg { max-width: 100%; font: 12px system-ui, "DejaVu Sans", sans-serif; display: block; }
.scroll { overflow-x: auto; } .scroll svg { max-width: none; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid #edf1f6; white-space: nowrap; }
th { color: #4a5568; font-weight: 600; font-size: 13px; } th:first-child, td:first-child { text-align: left; }
td small { color: #718096; } tr:hover td { background: #f8fafc; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: #4a5568; margin-top: 6px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: #4a5568; } dd { margin: 0; overflow-wrap: anywhere; }
"""


def write_page(
    path: Path, report: dict[str, Any], trees: Sequence[DrawnTree], logs_folder: Path
) -> None:
    """`report` is report.json's content. Training curves come from `logs_folder`/train.jsonl if it is there."""
    body = "".join(
        [
            f"<h1>{escape(report['facts']['run'])}: how good a tree is this drafter?</h1>",
            f'<p class="sub">{escape(report["facts"]["target"])} &middot; {escape(report["facts"]["drafter"])}</p>',
            _cards(report),
            '<div class="grid">',
            *_sections(report, trees, logs_folder),
            "</div>",
        ]
    )
    title = escape(report["facts"]["run"])
    with atomic_path(path) as aside:
        aside.write_text(
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{STYLE}</style></head><body><main>{body}</main></body></html>\n",
            encoding="utf-8",
        )


def acceptor_name(row: dict[str, Any]) -> str:
    return row["acceptor"] if row["budget"] is None else f"{row['acceptor']} {row['budget']}"


def select(report: dict[str, Any], mode: str, task: str = ALL_TASKS) -> list[dict[str, Any]]:
    """Rows of one mode and task that have passes."""
    rows = [row for row in report["rows"] if row["mode"] == mode and row["task"] == task]
    return [row for row in rows if row["num_passes"]]


def _sections(report: dict[str, Any], trees: Sequence[DrawnTree], logs_folder: Path) -> list[str]:
    replay, live = select(report, "replay"), select(report, "live")
    parts = []
    if replay:
        parts += [
            _section(
                "Acceptance length by tree budget",
                "Tokens a verify pass emits: accepted draft tokens and the bonus token. Mean over prompts with its 95 % "
                "interval; dots are live decoding.",
                acceptance_by_budget(replay, live),
            ),
            _section(
                "How deep drafts survive",
                "Share of anchors whose recorded tokens up to this depth are all in the tree.",
                survival_chart(report["survival"]),
            ),
            _section(
                "By task",
                "Acceptance length in replay, macro mean over prompts with its 95 % interval.",
                _task_table(report),
                "wide",
            ),
        ]
    if live:
        parts += [
            _section(
                "Live and replay side by side",
                "Greedy live decoding beside the replay of the very same records (they must agree) and of all test rows. Speeds are "
                "without prefill, plain decoding in the same run.",
                _live_table(live, report["side_by_side"], replay),
                "wide",
            ),
            _section(
                "Where decoding time goes",
                "Share of live decoding time, prefill not counted. `rest` is the walk and bookkeeping.",
                stage_chart(live),
            ),
        ]
    if replay:
        parts += [
            _section(
                "Recall of each slot",
                "Is the recorded token among the slot's k likeliest, whatever came before it?",
                recall_chart(report["recall"]),
            ),
            _section(
                "Is the drafter's confidence true?",
                "Nodes of the largest tree by path probability: how many of them were right.",
                calibration_chart(report["calibration"]["nodes"])
                + _calibration_table(report["calibration"]["accepted_per_anchor"]),
            ),
        ]
    for tree in sorted(trees, key=lambda tree: -len(tree.accepted))[:MAX_TREES]:
        parts.append(
            _section(
                f"A draft tree of {len(tree.parents) - 1} nodes that yields {len(tree.accepted)} tokens",
                f"Best verify pass of prompt {escape(tree.prompt_id[:12])}. Green: the anchor, the accepted path and "
                "(dashed) the bonus token. &middot; is a space.",
                f'<div class="scroll">{tree_chart(tree)}</div>',
                "wide",
            )
        )
    parts += [_section(title, note, chart) for title, note, chart in training_charts(logs_folder)]
    parts.append(_section("Checks", "", _checks(report)))
    parts.append(_section("This run", "", _facts(report)))
    return parts


def _section(title: str, note: str, body: str, kind: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{note}{body}</section>'


def _cards(report: dict[str, Any]) -> str:
    replay, live = select(report, "replay"), select(report, "live")
    cards = []
    chain = [row for row in replay if row["acceptor"] == "chain"]
    trees = [row for row in replay if row["acceptor"] == "tree"]
    cards += [
        _card(f"{row['acceptance_macro']:.2f}", "chain, tokens a pass (replay)") for row in chain
    ]
    if trees:
        best = max(trees, key=lambda row: row["budget"])
        low, high = best["ci95"]
        cards.append(
            _card(
                f"{best['acceptance_macro']:.2f}",
                f"tree of {best['budget']}, tokens a pass (replay), {low:.2f} to {high:.2f}",
                "good",
            )
        )
    speeds = {acceptor_name(row): row["tokens_per_s"] for row in reversed(live)}  # coldest last
    if "plain" in speeds:
        name, speed = max(
            ((n, s) for n, s in speeds.items() if n != "plain"), key=lambda item: item[1]
        )
        cards.append(
            _card(f"{speed / speeds['plain']:.2f}&times;", f"speed of {name} over plain decoding")
        )
    for key, what in (
        ("lossless", "prompts: greedy output equal to plain decoding"),
        ("parity", "live passes that replay predicts exactly"),
    ):
        found = report[key]
        total = found["num_prompts"] if key == "lossless" else found["num_passes"]
        if total:
            kind = "good" if found["num_equal"] == total else "bad"
            cards.append(_card(f"{found['num_equal']}/{total}", what, kind))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(number: str, what: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{number}</b><span>{escape(what)}</span></div>'


def _with_interval(row: dict[str, Any]) -> str:
    low, high = row["ci95"]
    return f"{row['acceptance_macro']:.2f} <small>{low:.2f}&ndash;{high:.2f}</small>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{name}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells}</tr>{lines}</table></div>'


def _task_table(report: dict[str, Any]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in report["rows"] if row["mode"] == "replay"))
    rows = [(task, select(report, "replay", task)) for task in tasks]
    head = ["task", "prompts", "passes (chain)", *(acceptor_name(row) for row in rows[0][1])]
    return _table(
        head,
        [
            [escape(task), str(found[0]["num_prompts"]), str(found[0]["num_passes"])]
            + [_with_interval(row) for row in found]
            for task, found in rows
            if found
        ],
    )


def _live_table(
    live: Sequence[dict[str, Any]],
    side_by_side: Sequence[dict[str, Any]],
    replay: Sequence[dict[str, Any]],
) -> str:
    same = {acceptor_name(row): f"{row['replay']:.2f}" for row in side_by_side}
    replayed = {acceptor_name(row): row for row in replay}
    plain = {row["temperature"]: row["tokens_per_s"] for row in live if row["acceptor"] == "plain"}
    rows = []
    for row in live:
        name, of_all = acceptor_name(row), replayed.get(acceptor_name(row))
        rows.append(
            [
                name,
                f"{row['temperature']:g}",
                str(row["num_prompts"]),
                _with_interval(row),
                same.get(name, "") if row["temperature"] == 0 else "",
                _with_interval(of_all)
                if of_all and of_all["temperature"] == row["temperature"]
                else "",
                f"{row['tokens_per_s']:.1f}",
                f"{row['tokens_per_s'] / plain[row['temperature']]:.2f}&times;",
            ]
        )
    return _table(
        [
            "acceptor",
            "T",
            "prompts",
            "live",
            "replay, same records",
            "replay, all test rows",
            "tokens/s",
            "over plain",
        ],
        rows,
    )


def _calibration_table(means: Sequence[dict[str, Any]]) -> str:
    rows = [
        [acceptor_name(row), f"{row['predicted']:.2f}", f"{row['realised']:.2f}"] for row in means
    ]
    return _table(["accepted tokens an anchor", "predicted", "realised"], rows)


def _checks(report: dict[str, Any]) -> str:
    lossless, parity = report["lossless"], report["parity"]
    lines = [
        (
            "greedy output equal to plain",
            f"{lossless['num_equal']} of {lossless['num_prompts']} prompts",
        ),
        ("live passes equal to replay", f"{parity['num_equal']} of {parity['num_passes']}"),
    ]
    for item in lossless["differing"]:
        lines.append(
            (
                f"differs: {item['prompt_id'][:12]}",
                f"{acceptor_name(item)}, token {item['index']}, target's two best logits {item['target_gap']:.1e} apart",
            )
        )
    for item in parity["differing"]:
        verdict = "near-tie" if item["is_near_tie"] else "NOT a near-tie"
        lines.append(
            (
                f"pass differs: {item['prompt_id'][:12]}",
                f"{acceptor_name(item)}, anchor {item['anchor']}: live {item['live']}, replay {item['replay']}, "
                f"gap {item['gap_nats']:.1e} nats, {verdict}",
            )
        )
    return _list(lines)


def _facts(report: dict[str, Any]) -> str:
    prints = [(f"{key} fingerprint", report[key][:16]) for key in ("target", "drafter", "config")]
    return _list([*report["facts"].items(), *prints])


def _list(lines: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in lines) + "</dl>"
