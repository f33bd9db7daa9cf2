"""What replay's sums say of the drafter as a tree: survival, recall, choices taken, calibration. JSON rows for report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from evaluation.acceptors import Acceptor
from evaluation.bootstrap import interval
from evaluation.child_ranks import count_child_ranks
from evaluation.prompt_records import PromptRecord, by_kind
from evaluation.sums import BIN_EDGES, RECALL_AT, ReplaySums


def survival_rows(acceptors: Sequence[Acceptor], sums: ReplaySums) -> list[dict[str, Any]]:
    """share[k-1]: of the anchors with a recorded token at depth k, how many have the recorded prefix in the tree."""
    return [
        _named(acceptor) | {"share": _share(sums, survived)}
        for acceptor, survived in zip(acceptors, sums.survived, strict=True)
    ]


def recall_rows(sums: ReplaySums) -> list[dict[str, Any]]:
    return [
        {"k": k, "share": _share(sums, recalled)}
        for k, recalled in zip(RECALL_AT, sums.recalled, strict=True)
    ]


def child_rank_rows(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    """share[r-1]: of the draft tokens that decoding emitted, how many were the drafter's r-th choice at their depth."""
    rows = []
    for kind, found in by_kind(records).items():
        if kind.is_plain:
            continue
        counts = count_child_ranks(ranks for record in found for ranks in record.child_ranks)
        total = sum(counts)
        share = [count / total for count in counts]
        rows.append(asdict(kind) | {"num_tokens": total, "counts": counts, "share": share})
    return rows


def calibration(
    acceptors: Sequence[Acceptor], sums: ReplaySums, parts: Sequence[ReplaySums]
) -> dict[str, Any]:
    """Predicted and realised accepted tokens an anchor; nodes of the largest tree by path probability; their ECE.

    `parts` are the prompts' shares of `sums`: the interval of predicted / realised draws prompts. The expected calibration
    error is sum over bins of (nodes in the bin / nodes) |mean probability - share right|. Source: Guo et al., arXiv:1706.04599.
    """
    bins = [
        {
            "low": BIN_EDGES[index],
            "high": BIN_EDGES[index + 1],
            "num_nodes": round(count),
            "predicted": predicted / count,
            "realised": right / count,
        }
        for index, (count, predicted, right) in enumerate(sums.bins.tolist())
        if count
    ]
    return {
        "accepted_per_anchor": [
            _named(acceptor) | _expectation(index, acceptor.key, sums, parts)
            for index, acceptor in enumerate(acceptors)
        ],
        "nodes": bins,
        "ece": _calibration_error(bins),
    }


def _expectation(
    index: int, key: str, sums: ReplaySums, parts: Sequence[ReplaySums]
) -> dict[str, Any]:
    acceptance = sums.acceptance_of(key)
    num_anchors = max(float(sums.num_anchors), 1.0)
    predicted, realised = float(sums.predicted[index]), float(sums.realised[index])
    return {
        "predicted": predicted / num_anchors,
        "realised": realised / num_anchors,
        "num_nodes": float(sums.num_nodes[index]) / num_anchors,
        "acceptance_macro": acceptance.macro if acceptance.num_prompts else None,
        "ratio": predicted / realised if realised else None,
        "ratio_ci95": _ratio_interval(index, parts),
    }


def _ratio_interval(index: int, parts: Sequence[ReplaySums]) -> list[float] | None:
    """None where a drawn sample may hold no accepted token at all."""
    pairs = np.array([[float(p.predicted[index]), float(p.realised[index])] for p in parts])
    if len(pairs) < 2 or (pairs[:, 1] > 0).sum() < 10:
        return None
    found = interval(pairs, lambda means: means[:, 0] / means[:, 1])
    return None if found is None else list(found)


def _calibration_error(bins: Sequence[dict[str, Any]]) -> float | None:
    total = sum(row["num_nodes"] for row in bins)
    if not total:
        return None
    return sum(row["num_nodes"] * abs(row["predicted"] - row["realised"]) for row in bins) / total


def _named(acceptor: Acceptor) -> dict[str, Any]:
    return {"acceptor": acceptor.name, "budget": acceptor.budget}


def _share(sums: ReplaySums, numerators: Tensor) -> list[float]:
    pairs = zip(numerators.tolist(), sums.labelled.tolist(), strict=True)
    return [numerator / count for numerator, count in pairs if count]
