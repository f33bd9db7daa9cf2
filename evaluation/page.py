"""report.html: one file that stands alone, with what a person decides by on top. docs/evaluation.md defines every number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.drawing import DrawnTree
from evaluation.headline import cards, select, weak_tasks
from evaluation.html import facts, heading, section, table, text, with_interval, write_html
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
        *_replayed(report),
        *_decoded(report),
        *_quality(report),
        *_trees(trees),
        *(section(title, [note], chart) for title, note, chart in training_charts(logs_folder)),
        section("Checks", [], _checks(report)),
        section("This run", [], _facts(report)),
        "</div>",
    ]
    write_html(path, about["run"], "".join(parts))


def _replayed(report: dict[str, Any]) -> list[str]:
    replay = select(report, "replay")
    if not replay:
        return []
    palette, temperature = Palette(report["rows"]), replay[0]["temperature"] or 0.0
    live = [row for row in select(report, "live") if row["temperature"] == temperature]
    return [
        section(
            "Acceptance length by tree budget",
            [
                "Tokens a verify pass emits: accepted draft tokens and the bonus token. Replay, mean over prompts with its "
                f"95 % interval; hollow dots are live decoding (fewer prompts, T={temperature:g})."
            ],
            by_budget("acceptance length", replay, live, palette, "acceptance_macro", 1.0),
        ),
        _speed_section(report, palette, temperature),
        section(
            "By task",
            [
                "Acceptance length in replay, macro mean over prompts with its 95 % interval; marked ▼ where the largest "
                "budget's whole interval is below the mean of all prompts."
            ],
            _task_table(report),
            "wide",
        ),
    ]


def _speed_section(report: dict[str, Any], palette: Palette, temperature: float) -> str:
    measured = [
        row
        for row in measured_rows(select(report, "live"))
        if row["temperature"] == temperature and row["acceptor"] != "plain"
    ]
    modelled = report["modelled"]
    if not modelled:
        if not measured:
            return ""
        notes = ["Tokens/s of live decoding over plain decoding in the same run."]
        return section(
            "Speed over plain decoding, measured",
            notes,
            by_budget("speed-up", measured, [], palette, "speedup", 1.0),
        )
    found = {acceptor_name(row): row["speedup"] for row in measured}
    rows = [
        [
            text(acceptor_name(row)),
            f"{row['num_nodes']:.1f}",
            f"{row['round_ms']:.3g}",
            with_interval(row["speedup"], row["ci95"]),
            f"{found[acceptor_name(row)]:.2f}" if acceptor_name(row) in found else "",
        ]
        for row in modelled
    ]
    return section(
        "Speed over plain decoding, modelled",
        [
            "Acceptance length (replay) x seconds of a plain step / seconds of a round with that many nodes, as measured on "
            "this machine. Hollow: measured by live decoding. The best budget is chosen on these very prompts."
        ],
        by_budget("speed-up", modelled, measured, palette, "speedup", 1.0)
        + table(["acceptor", "nodes", "ms a round", "modelled", "measured"], rows),
    )


def _decoded(report: dict[str, Any]) -> list[str]:
    live = select(report, "live")
    if not live:
        return []
    return [
        section(
            "Live and replay side by side",
            [
                "Greedy live decoding beside the replay of the very same records (they must agree) and of all test rows. "
                "Speeds are without prefill; plain decoding ran in the same run."
            ],
            _live_table(report, live),
            "wide",
        ),
        section(
            "Where a pass spends its time",
            [
                "Milliseconds a verify pass, prefill not counted. `rest` is the walk and bookkeeping."
            ],
            stage_chart(live),
        ),
    ]


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
        _calibration_section(report["calibration"]),
    ]
    if taken:
        parts.insert(
            1,
            section(
                "Which choices are taken",
                [
                    "Of the draft tokens that were emitted, the share that was the drafter's first choice at its depth, its "
                    "second, and so on. A chain can use first choices only."
                ],
                child_rank_chart(taken),
            ),
        )
    return parts


def _calibration_section(calibration: dict[str, Any]) -> str:
    before = calibration["unfitted"]
    if before is None:
        curves = {"drafter": calibration["nodes"]}
        notes = [f"Expected calibration error over nodes: {_number(calibration['ece'])}."]
    else:
        curves = {"after the temperature fit": calibration["nodes"], "before": before["nodes"]}
        notes = [
            f"Expected calibration error over nodes: {_number(before['ece'])} before the temperature fit, "
            f"{_number(calibration['ece'])} after it."
        ]
    return section(
        "Is the drafter's confidence true?",
        ["Nodes of the largest tree by path probability: how many of them were right.", *notes],
        calibration_chart(curves) + _calibration_table(calibration, before),
    )


def _calibration_table(calibration: dict[str, Any], before: dict[str, Any] | None) -> str:
    head = ["accepted tokens an anchor", "nodes", "expected", "accepted", "expected / accepted"]
    rows = [
        [
            text(acceptor_name(row)),
            f"{row['num_nodes']:.1f}",
            f"{row['predicted']:.2f}",
            f"{row['realised']:.2f}",
            "" if row["ratio"] is None else with_interval(row["ratio"], row["ratio_ci95"]),
        ]
        for row in calibration["accepted_per_anchor"]
    ]
    if before is not None:
        head.append("before the fit: expected, accepted")
        for cells, row in zip(rows, before["accepted_per_anchor"], strict=True):
            cells.append(f"{row['predicted']:.2f}, {row['realised']:.2f}")
    return table(head, rows)


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


def _task_table(report: dict[str, Any]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in report["rows"] if row["mode"] == "replay"))
    found = [(task, select(report, "replay", task)) for task in tasks]
    weak = {row["task"] for row in weak_tasks(report) or []}
    head = ["task", "prompts", "passes (chain)", *(acceptor_name(row) for row in found[0][1])]
    return table(
        head,
        [
            [f"{text(task)}{' ▼' if task in weak else ''}", str(rows[0]["num_prompts"])]
            + [str(rows[0]["num_passes"])]
            + [with_interval(row["acceptance_macro"], row["ci95"]) for row in rows]
            for task, rows in found
            if rows
        ],
    )


def _live_table(report: dict[str, Any], live: Sequence[dict[str, Any]]) -> str:
    same = {acceptor_name(row): row for row in report["side_by_side"]}
    replayed = {(acceptor_name(r), r["temperature"]): r for r in select(report, "replay")}
    faster = {(acceptor_name(r), r["temperature"]): r["speedup"] for r in measured_rows(live)}
    rows = []
    for row in live:
        key = acceptor_name(row), row["temperature"]
        of_same, of_all = same.get(key[0]) if key[1] == 0 else None, replayed.get(key)
        rows.append(
            [
                text(key[0]),
                f"{key[1]:g}",
                str(row["num_prompts"]),
                with_interval(row["acceptance_macro"], row["ci95"]),
                f"{of_same['replay']:.2f}" if of_same else "",
                with_interval(of_all["acceptance_macro"], of_all["ci95"]) if of_all else "",
                f"{row['tokens_per_s']:.1f}",
                f"{faster[key]:.2f}&times;" if key in faster else "",
            ]
        )
    head = ["acceptor", "T", "prompts", "live", "replay, same records", "replay, all test rows"]
    return table([*head, "tokens/s", "over plain"], rows)


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
    return facts(lines)


def _facts(report: dict[str, Any]) -> str:
    prints = [(f"{key} fingerprint", report[key][:16]) for key in ("target", "drafter", "config")]
    return facts([*report["facts"].items(), *prints])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
