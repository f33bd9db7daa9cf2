"""Acceptance length from feature rows: the whole decode is replayed from the drafter's log-probs and the recorded tokens.

The walk follows the recorded response, so a draft is accepted exactly as far as the response's next tokens are in the tree;
no target forward is needed, and one pass over the vocabulary gives every budget at once (DESIGN section 6). Exact for
greedy records, unbiased for sampled ones at the same temperature.

Shapes: N anchors, L = K-1 slots, M children kept a slot, B tree budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.features import FeatureRow
from ddtree.build import TreeBatch, build_trees
from ddtree.replay import accepted, chain_accepted, ranks_in, replay_walk
from drafter.config import DrafterConfig
from drafter.model import Drafter
from evaluation.acceptance import Acceptance, PromptPasses, measure_acceptance
from evaluation.child_ranks import replay_child_ranks
from evaluation.decode import CHAIN, Acceptor, tree_acceptor
from evaluation.scores import SlotScores, find_responses, score_anchors
from evaluation.sums import RECALL_AT, AcceptorOutcome, ReplaySums, recorded_nodes
from target.head import TargetHead


@dataclass(frozen=True)
class ReplayOptions:
    budgets: tuple[int, ...]
    """Increasing."""
    drafter_temperature: float = 1.0
    max_new_tokens: int | None = None
    """Responses are cut here, as live decoding is."""
    anchors_per_forward: int = 256
    head_chunk_rows: int = 1024
    """Rows of logits alive at once."""

    @property
    def acceptors(self) -> list[Acceptor]:
        """The chain, then the tree at every budget: the order of all tables."""
        return [CHAIN, *(tree_acceptor(budget) for budget in self.budgets)]


@dataclass(frozen=True)
class RowReplay:
    """One prompt: emitted tokens a pass for every acceptor (by key), and its share of the sums."""

    prompt_id: str
    task: str
    passes: dict[str, list[int]]
    child_ranks: dict[str, list[list[int]]]
    """A list a pass: places of the emitted draft tokens in their slots' lists (evaluation/child_ranks.py)."""
    sums: ReplaySums
    unfitted: ReplaySums | None = None
    """The same at drafter temperature 1, where `sums` are after a fit."""


@dataclass
class ReplayResult:
    """Rows of this rank. Ranks add up `sums` (see ReplaySums); the rows keep the intervals and the tasks possible."""

    options: ReplayOptions
    sums: ReplaySums
    rows: list[RowReplay] = field(default_factory=list)

    def prompts(self, acceptor: Acceptor) -> list[PromptPasses]:
        return [
            PromptPasses(row.prompt_id, row.task, tuple(row.passes[acceptor.key]))
            for row in self.rows
        ]

    def acceptance(self, acceptor: Acceptor) -> Acceptance:
        return measure_acceptance(self.prompts(acceptor))


def replay_rows(
    drafter: Drafter,
    head: TargetHead,
    rows: Iterable[FeatureRow],
    budgets: Sequence[int],
    *,
    drafter_temperature: float = 1.0,
    max_new_tokens: int | None = None,
    anchors_per_forward: int = 256,
    head_chunk_rows: int = 1024,
) -> ReplayResult:
    """Replay every response of every row for the chain and the tree at each budget, on the device of `head`.

    The drafter is put in evaluation mode and handed back as it was.
    """
    options = ReplayOptions(
        tuple(sorted(set(budgets))),
        drafter_temperature,
        max_new_tokens,
        anchors_per_forward,
        head_chunk_rows,
    )
    result = ReplayResult(options, empty_sums(drafter.config, options))
    with _evaluation_mode(drafter):
        for row in rows:
            replayed = replay_row(drafter, head, row, options)
            result.rows.append(replayed)
            result.sums += replayed.sums
    return result


@torch.no_grad()
def replay_row(
    drafter: Drafter, head: TargetHead, row: FeatureRow, options: ReplayOptions
) -> RowReplay:
    """One prompt. Its responses (one a turn) are replayed apart, each from its own r_0, and their passes joined."""
    sums = empty_sums(drafter.config, options)
    passes: dict[str, list[int]] = {acceptor.key: [] for acceptor in options.acceptors}
    child_ranks: dict[str, list[list[int]]] = {key: [] for key in passes}
    for response in find_responses(row.loss_mask, options.max_new_tokens):
        per_anchor: dict[str, list[int]] = {key: [] for key in passes}
        gold_child_ranks: list[list[int]] = []
        for start in range(0, response.num_drafted, options.anchors_per_forward):
            anchors = range(start, min(start + options.anchors_per_forward, response.num_drafted))
            scores = score_anchors(
                drafter,
                head,
                row,
                response,
                anchors,
                num_children=max(*options.budgets, *RECALL_AT),
                temperature=options.drafter_temperature,
                head_chunk_rows=options.head_chunk_rows,
            )
            trees = build_trees(scores.top_log_probs, max(options.budgets))
            ranks = ranks_in(trees, scores.gold_child_ranks, scores.num_gold)
            found = anchor_outcomes(scores, ranks, trees, options)
            sums.add_anchors(scores, ranks, found, trees)
            gold_child_ranks += scores.gold_child_ranks.tolist()
            for key, outcome in found.items():
                per_anchor[key] += outcome.accepted.tolist()
        for key, counts in per_anchor.items():
            walked = replay_walk(counts, response.num_drafted)
            passes[key] += walked
            child_ranks[key] += replay_child_ranks(gold_child_ranks, counts, walked)
    sums.add_prompt(
        [PromptPasses(row.sample_id, row.task, tuple(emitted)) for emitted in passes.values()]
    )
    return RowReplay(row.sample_id, row.task, passes, child_ranks, sums)


def anchor_outcomes(
    scores: SlotScores, ranks: Tensor, trees: TreeBatch, options: ReplayOptions
) -> dict[str, AcceptorOutcome]:
    """Every acceptor at every anchor, by key. trees: the largest budget's, whose first B nodes are the tree of budget B."""
    found = accepted_tokens(scores, ranks, options)
    num_slots = scores.gold_log_probs.shape[1]
    slots = torch.arange(1, num_slots + 1, device=ranks.device)
    chain = scores.top_log_probs[..., 0].double().cumsum(1).exp()
    expected = torch.where(slots <= scores.num_gold[:, None], chain, 0).sum(1)
    num_nodes = torch.full_like(scores.num_gold, num_slots)
    outcomes = {CHAIN.key: AcceptorOutcome(found[CHAIN.key], expected, num_nodes)}
    probs = torch.where(recorded_nodes(trees, scores.num_gold), trees.scores.double().exp(), 0)
    for budget in options.budgets:
        key = tree_acceptor(budget).key
        sizes = trees.num_nodes.clamp(max=budget)
        outcomes[key] = AcceptorOutcome(found[key], probs[:, :budget].sum(1), sizes)
    return outcomes


def accepted_tokens(scores: SlotScores, ranks: Tensor, options: ReplayOptions) -> dict[str, Tensor]:
    """Accepted draft tokens (N,) int64 by acceptor key, in the order of `options.acceptors`.

    ranks: (N, L) int64, places of the recorded prefixes in the tree's total order (ddtree/replay.py).
    """
    found = {CHAIN.key: chain_accepted(scores.gold_child_ranks, scores.num_gold)}
    for budget in options.budgets:
        found[tree_acceptor(budget).key] = accepted(ranks, scores.num_gold, budget)
    return found


def empty_sums(config: DrafterConfig, options: ReplayOptions) -> ReplaySums:
    keys = tuple(acceptor.key for acceptor in options.acceptors)
    return ReplaySums.zero(keys, config.block_size - 1)


@contextlib.contextmanager
def _evaluation_mode(drafter: Drafter) -> Iterator[None]:
    was_training = drafter.training
    drafter.eval()
    try:
        yield
    finally:
        drafter.train(was_training)
