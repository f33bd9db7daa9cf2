"""Acceptance length on validation rows during training, by replay: the number checkpoints are compared by."""

from __future__ import annotations

from collections.abc import Sequence

from common.distributed import Ranks, raise_together, sum_over_ranks
from configs.schema import Config
from data.features import FeatureSet, RowEntry
from drafter.model import Drafter
from evaluation.acceptors import CHAIN
from evaluation.replay import replay_rows
from evaluation.sums import ReplaySums
from target.head import TargetHead


def validate(
    drafter: Drafter,
    head: TargetHead,
    features: FeatureSet,
    entries: Sequence[RowEntry],
    config: Config,
    ranks: Ranks,
) -> ReplaySums:
    """Sums over all `entries`, shared out to the ranks and added up again. Collective."""
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
    return result.sums.with_flat(sum_over_ranks(result.sums.flat()))


def validation_metrics(sums: ReplaySums) -> dict[str, float]:
    """By metric name (train/tracking.py); empty if no prompt has a verify pass."""
    if not sums.acceptance_of(CHAIN.key).num_passes:
        return {}
    metrics = {"validation/chain_acceptance": sums.acceptance_of(CHAIN.key).macro}
    for key in sums.acceptors:
        if key.startswith("tree-"):
            budget = key.removeprefix("tree-")
            metrics[f"validation/tree_acceptance_{budget}"] = sums.acceptance_of(key).macro
    return metrics
