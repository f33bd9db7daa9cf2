"""What the evaluate stage prints at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.headline import select
from evaluation.plots import acceptor_name


def summary_lines(report: dict[str, Any]) -> list[str]:
    """A row for the chain and for each budget: replay, live, and speed against plain decoding in the same run."""
    greedy = [row for row in select(report, "live") if row["temperature"] == 0]
    live = {acceptor_name(row): row for row in greedy}
    plain_speed = live["plain"]["tokens_per_s"] if "plain" in live else None
    rows = [["acceptor", "replay [95 % interval]", "live", "tokens/s", "over plain"]]
    if plain_speed is not None:
        rows.append(["plain", "", "1.00", f"{plain_speed:.1f}", "1.00x"])
    replayed = {acceptor_name(row): row for row in select(report, "replay")}
    for name in dict.fromkeys([*replayed, *(name for name in live if name != "plain")]):
        cells = [name, _interval(replayed.get(name)), "", "", ""]
        if name in live and plain_speed is not None:
            speed = live[name]["tokens_per_s"]
            cells[2:] = [
                f"{live[name]['acceptance_macro']:.2f}",
                f"{speed:.1f}",
                f"{speed / plain_speed:.2f}x",
            ]
        rows.append(cells)
    return [*_aligned(rows), *_checks(report)]


def lossless_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['num_equal']} of {result['num_prompts']} prompts equal to plain greedy decoding, token for token "
        f"({result['num_tokens']} tokens, {result['num_decodes']} speculative decodes)"
    ]
    for item in result["differing"]:
        lines.append(
            f"differs: prompt {item['prompt_id']}, drafter {item['drafter']}, {item['acceptor']}, token {item['index']}, "
            f"the target's two best logits are {item['target_gap']:.1e} apart"
        )
    return lines


def _checks(report: dict[str, Any]) -> list[str]:
    lossless, parity = report["lossless"], report["parity"]
    if not lossless["num_prompts"]:
        return []
    return [
        f"lossless: {lossless['num_equal']} of {lossless['num_prompts']} prompts equal to plain greedy decoding",
        f"live = replay: {parity['num_equal']} of {parity['num_passes']} passes",
    ]


def _interval(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    low, high = row["ci95"]
    return f"{row['acceptance_macro']:.2f} [{low:.2f}, {high:.2f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
