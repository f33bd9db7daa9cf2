"""Modelled speed over plain decoding: acceptance length from replay, seconds from the round cost measured on this machine.

    speed-up = acceptance length * (seconds of a plain step) / (seconds of a round with that many nodes)

A plain step yields one token, a round as many as the micro acceptance length (tokens over passes: what speed depends on; the
macro mean would count a prompt of few long passes as much as one of many short ones). It says what every budget would do without decoding
with it; where live decoding ran, the measured ratio stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RoundSeconds:
    """What decoding costs on the machine that evaluated."""

    plain_step: float
    by_nodes: tuple[float, ...]
    """Draft, build, verify, walk and commit of a round with 0, 1, ... draft nodes."""

    def of(self, num_nodes: float) -> float | None:
        """Between whole numbers linear; None beyond what was measured."""
        if num_nodes > len(self.by_nodes) - 1:
            return None
        return float(np.interp(num_nodes, range(len(self.by_nodes)), self.by_nodes))


def modelled_rows(
    rows: Sequence[Mapping[str, Any]], num_nodes: Sequence[float], cost: RoundSeconds
) -> list[dict[str, Any]]:
    """rows: replay of all prompts, an acceptor each; num_nodes: mean nodes of a tree, likewise, over all anchors.

    A budget chosen block by block is priced at its mean size, which flatters it a little (the cost is convex).
    """
    found = []
    for row, nodes in zip(rows, num_nodes, strict=True):
        seconds = cost.of(nodes)
        if seconds is None or row["acceptance_micro"] is None:
            continue
        gain, ends = cost.plain_step / seconds, row["micro_ci95"]
        found.append(
            {
                "acceptor": row["acceptor"],
                "budget": row["budget"],
                "num_nodes": nodes,
                "round_ms": 1000 * seconds,
                "speedup": row["acceptance_micro"] * gain,
                "ci95": None if ends is None else [end * gain for end in ends],
            }
        )
    return found


def measured_rows(live: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a second over those of plain decoding at the same temperature in the same run; live rows of all prompts."""
    plain = {row["temperature"]: row["tokens_per_s"] for row in live if row["acceptor"] == "plain"}
    return [
        {name: row[name] for name in ("acceptor", "budget", "temperature")}
        | {"speedup": row["tokens_per_s"] / plain[row["temperature"]]}
        for row in live
        if row["tokens_per_s"] and plain.get(row["temperature"])
    ]
