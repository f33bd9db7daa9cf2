"""report.html: one file that stands alone, with what a person decides by on top. docs/evaluation.md defines every number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.drawing import DrawnTree
from evaluation.headline import cards, select, weak_tasks
from evaluation.html import facts, heading, section, text, write_html
from evaluation.plots import (
    Palette,
    acceptor_name,
    by_budget,
    calibration_chart,
    child_rank_chart,
    recall_chart,
    stage_chart,
    survival_chart,
    training_charts,
)
from evaluation.speed import measured_rows
from evaluation.tables import acceptor_table, calibration_table, task_table
from evaluation.tree_chart import num_left_out, tree_chart


def write_page(
    path: Path, report: dict[str, Any], trees: Sequence[DrawnTree], logs_folder: Path
) -> None:
    """`report` is report.json's content. Training curves come from `logs_folder`/train.jsonl if it is there."""
    about = report["facts"]
    parts = [
        heading(
            f"{about['run']}: how good a tree is this drafter?",
            f"{about['target']} · {about['drafter']}",
        ),
        cards(report),
        '<div class="grid">',
        *_results(report),
        *_quality(report),
        *_stages(report),
        *_trees(trees),
        *(section(title, [note], chart) for title, note, chart in training_charts(logs_folder)),
        section("Checks", [], _checks(report)),
        section("This run", [], _facts(report)),
        "</div>",
    ]
    write_html(path, about["run"], "".join(parts))


def _results(report: dict[str, Any]) -> list[str]:
    replay, live = select(report, "replay"), select(report, "live")
    lines = replay or [row for row in live if row["acceptor"] != "plain"]
    if not lines:
        return []
    palette, temperature = Palette(report["rows"]), lines[0]["temperature"] or 0.0
    lines = [row for row in lines if row["temperature"] == lines[0]["temperature"]]
    dots = [row for row in live if row["temperature"] == temperature] if replay else []
    return [
        section(
            "Acceptance length by tree budget",
            [
                "Tokens a verify pass emits: accepted draft tokens and the bonus token. Mean over prompts with its 95 % "
                f"interval, {'replay; hollow dots are live decoding of fewer prompts' if replay else 'live'}, T={temperature:g}."
            ],
            by_budget("acceptance length", lines, dots, palette, "acceptance_macro", 1.0),
        ),
        _speed_section(report, palette, temperature),
        section(
            "Every acceptor",
            [
                "Acceptance length by replay of held-out prompts, by live decoding, and by replay of the very same live records "
                "(the last two must agree). Speeds are without prefill; plain decoding ran in the same run. A round is draft, "
                "build, verify and commit."
            ],
            acceptor_table(report),
            "wide",
        ),
        _task_section(report),
    ]


def _speed_section(report: dict[str, Any], palette: Palette, temperature: float) -> str:
    measured = [
        row
        for row in measured_rows(select(report, "live"))
        if row["temperature"] == temperature and row["acceptor"] != "plain"
    ]
    modelled = report["modelled"]
    if modelled:
        notes = [
            "Acceptance length (replay) x seconds of a plain step / seconds of a round with that many nodes, measured on "
            f"{report['settled']['costs']['machine']}; hollow dots are measured by live decoding. The best budget is chosen on "
            "these very prompts."
        ]
        chart = by_budget("speed-up", modelled, measured, palette, "speedup", 1.0)
        return section("Speed over plain decoding, modelled", notes, chart)
    if not measured:
        return ""
    notes = ["Tokens/s of live decoding over plain decoding in the same run."]
    chart = by_budget("speed-up", measured, [], palette, "speedup", 1.0)
    return section("Speed over plain decoding, measured", notes, chart)


def _task_section(report: dict[str, Any]) -> str:
    if weak_tasks(report) is None:
        return ""
    return section(
        "By task",
        [
            "Acceptance length, macro mean over a task's prompts with its 95 % interval; marked ▼ where the largest budget's "
            "whole interval is below the mean of all prompts (tasks of 5 prompts or more)."
        ],
        task_table(report),
        "wide",
    )


def _stages(report: dict[str, Any]) -> list[str]:
    live = select(report, "live")
    if not live:
        return []
    notes = ["Milliseconds a verify pass, prefill not counted. `rest` is the walk and bookkeeping."]
    return [section("Where a pass spends its time", notes, stage_chart(live))]


def _quality(report: dict[str, Any]) -> list[str]:
    if not select(report, "replay"):
        return []
    palette = Palette(report["rows"])
    taken = [row for row in report["child_ranks"] if row["num_tokens"]]
    parts = [
        section(
            "How deep drafts survive",
            ["Share of anchors whose recorded tokens up to this depth are all in the tree."],
            survival_chart(report["survival"], palette),
        ),
        section(
            "Recall of each slot",
            ["Is the recorded token among the slot's k likeliest, whatever came before it?"],
            recall_chart(report["recall"]),
        ),
        _calibration_section(report),
    ]
    if taken:
        parts.insert(
            1,
            section(
                "Which choices are taken",
                [
                    "Of the draft tokens that were emitted, the share that was the drafter's first choice at its depth, its "
                    "second, and so on. A matched chain takes first choices only."
                ],
                child_rank_chart(taken),
            ),
        )
    return parts


def _calibration_section(report: dict[str, Any]) -> str:
    calibration, before = report["calibration"], report["calibration"]["unfitted"]
    if before is None:
        curves = {"drafter": calibration["nodes"]}
        notes = [f"Expected calibration error over nodes: {_number(calibration['ece'])}."]
    else:
        curves = {"after the temperature fit": calibration["nodes"], "before": before["nodes"]}
        notes = [
            f"Expected calibration error over nodes: {_number(before['ece'])} before the temperature fit, "
            f"{_number(calibration['ece'])} after it.",
            _fit_note(report["settled"]["temperatures"]),
        ]
    return section(
        "Is the drafter's confidence true?",
        [
            "Nodes of the largest tree by path probability: how many of them were right. The table: accepted tokens an anchor, "
            "as the drafter expects them and as they are; ratio above 1 is over-confident.",
            *notes,
        ],
        calibration_chart(curves) + calibration_table(calibration, before),
    )


def _fit_note(fit: dict[str, Any]) -> str:
    def loss(name: str) -> float:
        pairs = zip(fit[name], fit["num_tokens"], strict=True)
        return sum(value * count for value, count in pairs) / sum(fit["num_tokens"])

    values = ", ".join(f"{value:.2f}" for value in fit["temperatures"])
    return (
        f"Temperatures a slot: {values}; loss {loss('nll_before'):.4f} to {loss('nll_after'):.4f} nats a token on "
        f"{fit['fitted_on']['num_rows']} {fit['fitted_on']['split']} rows."
    )


def _trees(trees: Sequence[DrawnTree]) -> list[str]:
    """The longest pass of all, a typical one of another prompt, and one that accepted nothing if there is any."""
    longest = sorted((t for t in trees if t.kind == "longest"), key=lambda t: -len(t.accepted))[:1]
    others = [
        t
        for t in trees
        if t.kind == "typical" and t.prompt_id not in {x.prompt_id for x in longest}
    ]
    others.sort(key=lambda tree: len(tree.accepted))
    typical = others[len(others) // 2 :][:1]
    lost = [t for t in others if len(t.accepted) == 1 and t not in typical][:1]
    titles = {"longest": longest, "a typical one": typical, "one that accepts nothing": lost}
    return [_tree(tree, what) for what, found in titles.items() for tree in found]


def _tree(tree: DrawnTree, what: str) -> str:
    num_nodes, left_out = len(tree.parents) - 1, num_left_out(tree)
    notes = [
        f"Green: the anchor, the accepted path and (dashed) the bonus token; #2 is the drafter's second choice. · is a space. "
        f"Prompt {tree.prompt_id[:12]}."
    ]
    if left_out:
        notes.append(f"{left_out} less likely nodes are not drawn.")
    if tree.num_emitted < len(tree.accepted):
        notes.append("The response ends inside the accepted path.")
    context = (
        f"<pre>…{text(tree.context)}<b>{text(tree.texts[0])}</b></pre>" if tree.context else ""
    )
    return section(
        f"A verify pass of {num_nodes} nodes that yields {tree.num_emitted} tokens: {what}",
        notes,
        context + tree_chart(tree),
        "wide",
    )


def _checks(report: dict[str, Any]) -> str:
    lossless, parity = report["lossless"], report["parity"]
    lines = [
        (
            "greedy output equal to plain",
            _of(lossless["num_equal"], lossless["num_prompts"], "prompts"),
        ),
        ("live passes equal to replay", _of(parity["num_equal"], parity["num_passes"], "passes")),
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
    return facts(lines)


def _of(equal: int, total: int, what: str) -> str:
    return f"{equal} of {total} {what}" if total else "not checked: no greedy live decoding ran"


def _facts(report: dict[str, Any]) -> str:
    prints = [(f"{key} fingerprint", report[key][:16]) for key in ("target", "drafter", "config")]
    return facts([*report["facts"].items(), *prints])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
