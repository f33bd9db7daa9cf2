"""What the evaluate stage prints at its end: a row an acceptor, budget and temperature, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.headline import select
from evaluation.plots import acceptor_name
from evaluation.speed import measured_rows

HEAD = ["acceptor", "T", "replay [95 % interval]", "live [95 % interval]", "tokens/s", "over plain"]


def summary_lines(report: Mapping[str, Any]) -> list[str]:
    """Replay, live, and speed against plain decoding in the same run; modelled speed where round costs are known."""
    replayed = {_key(row): row for row in select(report, "replay")}
    live = {_key(row): row for row in select(report, "live")}
    measured = {_key(row): row["speedup"] for row in measured_rows(list(live.values()))}
    modelled = {acceptor_name(row): row["speedup"] for row in report["modelled"]}
    rows = [[*HEAD, *(["modelled"] if modelled else [])]]
    for key in _ordered([*replayed, *live]):
        name, temperature = key
        speed = live[key]["tokens_per_s"] if key in live else None
        cells = [
            name,
            "as recorded" if temperature is None else f"{temperature:g}",
            _interval(replayed.get(key)),
            _interval(live.get(key)),
            "" if speed is None else f"{speed:.1f}",
            f"{measured[key]:.2f}x" if key in measured else "",
        ]
        if modelled:
            found = modelled.get(name) if key in replayed else None
            cells.append("" if found is None else f"{found:.2f}x")
        rows.append(cells)
    return [*aligned(rows), *_checks(report)]


def lossless_lines(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['num_equal']} of {result['num_prompts']} prompts equal to plain greedy decoding, token for token "
        f"({result['num_tokens']} tokens, {result['num_decodes']} speculative decodes)"
    ]
    if result["num_prompts"] < result["num_asked"]:
        lines.append(f"{result['num_asked']} were asked for; the test split has no more")
    for item in result["differing"]:
        lines.append(
            f"differs: prompt {item['prompt_id']}, drafter {item['drafter']}, {item['acceptor']}, token {item['index']}, "
            f"the target's two best logits are {item['target_gap']:.1e} apart"
        )
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _ordered(keys: Sequence[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Temperatures apart, plain decoding first, else in the order of the report."""
    unique = list(dict.fromkeys(keys))
    temperatures = list(dict.fromkeys(temperature for _, temperature in unique))
    return sorted(unique, key=lambda key: (temperatures.index(key[1]), key[0] != "plain"))


def _key(row: Mapping[str, Any]) -> tuple[str, float | None]:
    return acceptor_name(row), row["temperature"]


def _checks(report: Mapping[str, Any]) -> list[str]:
    lossless, parity = report["lossless"], report["parity"]
    if not lossless["num_prompts"]:
        return []
    return [
        f"lossless: {lossless['num_equal']} of {lossless['num_prompts']} prompts equal to plain greedy decoding",
        f"live = replay: {parity['num_equal']} of {parity['num_passes']} passes",
    ]


def _interval(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["ci95"] is None:
        return f"{row['acceptance_macro']:.2f}"
    low, high = row["ci95"]
    return f"{row['acceptance_macro']:.2f} [{low:.2f}, {high:.2f}]"
