"""What one replay of the validation rows says of the drafter as a tree, during training: the curves that a run is judged by.

Acceptance length is given for every budget; shapes (survival by depth, tokens a pass emits) for the chain and for the tree of
train.tree_budget, at which checkpoints are compared. Names and units: train/tracking.py.

A acceptors, K block size (a pass emits 1..K tokens), L = K-1 slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed import Ranks, raise_together, sum_over_ranks
from configs.schema import Config
from data.features import FeatureSet, RowEntry
from drafter.model import Drafter
from evaluation.acceptors import CHAIN, Acceptor, tree_acceptor
from evaluation.replay import ReplayResult, replay_rows
from evaluation.sums import BIN_EDGES, ReplaySums
from evaluation.tree_quality import calibration, recall_rows, survival_rows
from target.head import TargetHead


@dataclass(frozen=True)
class Validation:
    """Numerators and denominators over all validation rows, the same on every rank."""

    acceptors: tuple[Acceptor, ...]
    sums: ReplaySums
    passes: Tensor
    """(A, K) float64: verify passes that emitted 1..K tokens."""


def validate(
    drafter: Drafter,
    head: TargetHead,
    features: FeatureSet,
    entries: Sequence[RowEntry],
    config: Config,
    ranks: Ranks,
) -> Validation:
    """Over all `entries`, shared out to the ranks and added up again. Collective."""
    own = entries[ranks.rank :: ranks.world_size]
    with raise_together(ranks):
        result = replay_rows(
            drafter,
            head,
            (features.read(entry) for entry in own),
            sorted({*config.evaluation.budgets, config.train.tree_budget}),
            drafter_temperature=config.evaluation.unfitted_temperature,
            head_chunk_rows=config.train.head_chunk_rows,
        )
        passes = count_passes(result, drafter.config.block_size)
    flat = result.sums.flat()
    total = sum_over_ranks(torch.cat([flat, passes.flatten()]))
    return Validation(
        tuple(result.options.acceptors),
        result.sums.with_flat(total[: len(flat)]),
        total[len(flat) :].cpu().view_as(passes),
    )


def count_passes(result: ReplayResult, block_size: int) -> Tensor:
    """(A, K) float64 of `result`'s rows: how many of their passes emit 1..K tokens."""

    def count(key: str) -> Tensor:
        emitted = [number for row in result.rows for number in row.passes[key]]
        return torch.bincount(torch.tensor(emitted, dtype=torch.int64), minlength=block_size + 1)

    keys = [acceptor.key for acceptor in result.options.acceptors]
    return torch.stack([count(key)[1:] for key in keys]).double()


def validation_metrics(found: Validation, tree_budget: int) -> dict[str, float]:
    """By metric name (train/tracking.py); empty if no prompt has a verify pass."""
    if not found.sums.acceptance_of(CHAIN.key).num_passes:
        return {}
    shown = [CHAIN, tree_acceptor(tree_budget)]
    return {
        **_acceptance(found),
        **_survival(found, shown),
        **_recall(found.sums),
        **_calibration(found),
        **_walks(found, shown),
    }


def _acceptance(found: Validation) -> dict[str, float]:
    return {
        f"validation/{_named(acceptor, 'acceptance')}": found.sums.acceptance_of(acceptor.key).macro
        for acceptor in found.acceptors
    }


def _survival(found: Validation, shown: Sequence[Acceptor]) -> dict[str, float]:
    rows = survival_rows(found.acceptors, found.sums)
    return {
        f"survival/{acceptor.key.replace('-', '_')}_depth_{depth:02d}": share
        for acceptor, row in zip(found.acceptors, rows, strict=True)
        if acceptor in shown
        for depth, share in _counted(row["share"])
    }


def _recall(sums: ReplaySums) -> dict[str, float]:
    return {
        f"recall/top_{row['k']}_slot_{slot:02d}": share
        for row in recall_rows(sums)
        for slot, share in _counted(row["share"])
    }


def _calibration(found: Validation) -> dict[str, float]:
    """Bins and ratios without a single node or accepted token say nothing and are left out."""
    measured = calibration(found.acceptors, found.sums, [])
    metrics = {}
    if measured["ece"] is not None:
        metrics["calibration/ece"] = measured["ece"]
    for acceptor, row in zip(found.acceptors, measured["accepted_per_anchor"], strict=True):
        if row["ratio"] is not None:
            metrics[f"calibration/{_named(acceptor, 'ratio')}"] = row["ratio"]
    for row in measured["nodes"]:
        number = BIN_EDGES.index(row["high"])
        metrics[f"calibration/expected_bin_{number:02d}"] = row["predicted"]
        metrics[f"calibration/right_bin_{number:02d}"] = row["realised"]
    return metrics


def _walks(found: Validation, shown: Sequence[Acceptor]) -> dict[str, float]:
    return {
        f"walk/{acceptor.key.replace('-', '_')}_emits_{number:02d}": count / sum(counts)
        for acceptor, counts in zip(found.acceptors, found.passes.tolist(), strict=True)
        if acceptor in shown
        for number, count in _counted(counts)
    }


def _named(acceptor: Acceptor, quantity: str) -> str:
    """`chain_acceptance`, `tree_acceptance_64`."""
    budget = "" if acceptor.budget is None else f"_{acceptor.budget}"
    return f"{acceptor.name}_{quantity}{budget}"


def _counted(values: Iterable[float]) -> Iterable[tuple[int, float]]:
    return enumerate(values, start=1)
