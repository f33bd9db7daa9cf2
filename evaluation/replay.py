"""Acceptance length from feature rows: the whole decode is replayed from the drafter's log-probs and the recorded tokens.

The walk follows the recorded response, so a draft is accepted exactly as far as the response's next tokens are in the tree;
no target forward is needed, and one pass over the vocabulary gives every budget at once (DESIGN section 6). Exact for
greedy records, unbiased for sampled ones at the same temperature.

Shapes: N anchors, L = K-1 slots, M children kept a slot, B tree budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from configs.schema import AcceptorName
from data.features import FeatureRow
from ddtree.build import build_trees
from ddtree.cost import RoundCost
from ddtree.replay import ranks_in, replay_walk
from drafter.config import DrafterConfig
from drafter.model import Drafter
from evaluation.acceptance import Acceptance, PromptPasses, measure_acceptance
from evaluation.acceptors import CHAIN_REJECTION, Acceptor, list_acceptors
from evaluation.child_ranks import replay_child_ranks
from evaluation.drafting import slot_temperatures
from evaluation.outcomes import anchor_outcomes
from evaluation.scores import SlotScores, draft_anchors, find_responses
from evaluation.sums import RECALL_AT, ReplaySums
from target.head import TargetHead


@dataclass(frozen=True)
class ReplayOptions:
    budgets: tuple[int, ...]
    """Increasing."""
    drafter_temperature: float | tuple[float, ...] = 1.0
    """Of all slots, or one a slot."""
    max_new_tokens: int | None = None
    """Responses are cut here, as live decoding is."""
    anchors_per_forward: int = 256
    head_chunk_rows: int = 1024
    """Rows of logits alive at once."""
    names: tuple[AcceptorName, ...] = ("chain", "tree")
    """chain_rejection is passed over: what it would have drawn is not in a record."""
    cost: RoundCost | None = None
    """For tree_cost."""
    compares_unfitted: bool = False
    """Also replay everything at drafter temperature 1."""

    @property
    def acceptors(self) -> list[Acceptor]:
        """In the order of all tables."""
        listed = list_acceptors(self.names, self.budgets, self.cost)
        return [acceptor for acceptor in listed if acceptor != CHAIN_REJECTION]

    @property
    def max_budget(self) -> int:
        return max(*self.budgets, 0 if self.cost is None else self.cost.max_budget, 1)


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
    unfitted_passes: dict[str, list[int]] | None = None
    """`passes` at drafter temperature 1; not kept in records."""


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
    tallies = [_Tally(drafter.config, options)]
    if options.compares_unfitted:
        tallies.append(_Tally(drafter.config, replace(options, drafter_temperature=1.0)))
    num_children = max(options.max_budget, *RECALL_AT)
    for response in find_responses(row.loss_mask, options.max_new_tokens):
        for start in range(0, response.num_drafted, options.anchors_per_forward):
            anchors = range(start, min(start + options.anchors_per_forward, response.num_drafted))
            drafted = draft_anchors(drafter, head, row, response, anchors)
            temperatures = [tally.temperatures for tally in tallies]
            scores = drafted.scores(head, num_children, temperatures, options.head_chunk_rows)
            for tally, at_own in zip(tallies, scores, strict=True):
                tally.add(at_own)
        for tally in tallies:
            tally.end_response(response.num_drafted)
    found, *plain = [tally.finish(row) for tally in tallies]
    for other in plain:
        found = replace(found, unfitted=other.sums, unfitted_passes=other.passes)
    return found


class _Tally:
    """What one prompt's replay at given temperatures adds up to."""

    def __init__(self, config: DrafterConfig, options: ReplayOptions):
        self.options = options
        self.temperatures = slot_temperatures(options.drafter_temperature, config.block_size - 1)
        self.sums = empty_sums(config, options)
        self.passes: dict[str, list[int]] = {acceptor.key: [] for acceptor in options.acceptors}
        self.child_ranks: dict[str, list[list[int]]] = {key: [] for key in self.passes}
        self._accepted: dict[str, list[int]] = {key: [] for key in self.passes}  # an anchor each
        self._gold_child_ranks: list[list[int]] = []

    def add(self, scores: SlotScores) -> None:
        """The next anchors of a response."""
        options = self.options
        trees = build_trees(scores.top_log_probs, options.max_budget)
        ranks = ranks_in(trees, scores.gold_child_ranks, scores.num_gold)
        found = anchor_outcomes(scores, trees, ranks, options.acceptors, options.cost)
        self.sums.add_anchors(scores, ranks, found, trees)
        self._gold_child_ranks += scores.gold_child_ranks.tolist()
        for key, outcome in found.items():
            self._accepted[key] += outcome.accepted.tolist()

    def end_response(self, num_drafted: int) -> None:
        """Walk over the anchors of the response that were added."""
        for key, counts in self._accepted.items():
            walked = replay_walk(counts, num_drafted)
            self.passes[key] += walked
            self.child_ranks[key] += replay_child_ranks(self._gold_child_ranks, counts, walked)
        self._accepted, self._gold_child_ranks = {key: [] for key in self.passes}, []

    def finish(self, row: FeatureRow) -> RowReplay:
        emitted = [
            PromptPasses(row.sample_id, row.task, tuple(passes)) for passes in self.passes.values()
        ]
        self.sums.add_prompt(emitted)
        return RowReplay(row.sample_id, row.task, self.passes, self.child_ranks, self.sums)


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
