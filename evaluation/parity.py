"""Do replay and live decoding agree, pass for pass? The check that replay's numbers mean what they say.

On a record that this very target decoded greedily in float32, with features that were not rounded, every live pass must
emit what replay says of its anchor. Passes are compared by anchor, so one that differs does not drag the later ones along.
What may differ is a near-tie: the recorded prefix and its rival differ by less than NEAR_TIE_NATS, within the noise of
two float32 orders of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from data.features import FeatureRow
from ddtree.build import build_trees
from ddtree.replay import ranks_in, replay_walk
from drafter.model import Drafter
from evaluation.acceptors import Acceptor
from evaluation.decoded import Decoded
from evaluation.drafting import slot_temperatures
from evaluation.gaps import Decisions
from evaluation.outcomes import anchor_outcomes
from evaluation.replay import ReplayOptions
from evaluation.scores import Response, score_anchors
from target.head import TargetHead
from target.load import Target
from target.taps import forward_with_taps

NEAR_TIE_NATS = 1e-4


@dataclass(frozen=True)
class DifferingPass:
    prompt_id: str
    acceptor: str
    budget: int | None
    anchor: int
    """Index of the anchor in the response."""
    live: int
    replay: int
    gap_nats: float
    """How far replay's decision was from falling the other way."""

    @property
    def is_near_tie(self) -> bool:
        return self.gap_nats < NEAR_TIE_NATS


@dataclass(frozen=True)
class Parity:
    """Live passes held against the replay of the same record."""

    num_passes: int
    num_equal: int
    differing: list[DifferingPass]
    replay_passes: dict[str, list[int]]
    """Emitted tokens a pass of the whole replayed record, by acceptor key."""


def record_row(
    target: Target,
    layer_ids: Sequence[int],
    prompt: Sequence[int],
    response: Sequence[int],
    prompt_id: str,
    task: str,
) -> FeatureRow:
    """A feature row of prompt and response, its features from one forward in the target's own dtype."""
    ids = torch.tensor([*prompt, *response], device=target.device)
    lengths = torch.tensor([len(ids)], device=target.device)
    taps = forward_with_taps(target, ids[None], lengths, layer_ids, need_last_hidden=False)
    mask = torch.arange(len(ids)) >= len(prompt)
    return FeatureRow(
        sample_id=prompt_id,
        source="live",
        task=task,
        split="test",
        input_ids=ids.cpu(),
        loss_mask=mask,
        features=taps.features[0],
    )


@torch.no_grad()
def compare_passes(
    drafter: Drafter,
    head: TargetHead,
    row: FeatureRow,
    decodes: Sequence[tuple[Acceptor, Decoded]],
    options: ReplayOptions,
) -> Parity:
    """Every live pass against the replay of its anchor. `row` is `record_row` of the plain greedy decode.

    A live decode that left the record (see losslessness) is compared up to there.
    """
    first = int(row.loss_mask.int().argmax())
    record = row.input_ids[first:].tolist()
    response = Response(first, len(record) - 1)
    if response.num_drafted == 0:
        return Parity(0, 0, [], {acceptor.key: [] for acceptor, _ in decodes})
    decisions = _decide(drafter, head, row, response, options)
    outcomes = anchor_outcomes(
        decisions.scores,
        decisions.trees,
        decisions.ranks,
        [acceptor for acceptor, _ in decodes],
        options.cost,
    )
    accepted = {key: outcome.accepted for key, outcome in outcomes.items()}
    num_passes, differing = 0, []
    for acceptor, decoded in decodes:
        for pass_record in decoded.records:
            anchor = pass_record.anchor
            if decoded.tokens[: anchor + 1] != record[: anchor + 1]:
                break
            num_passes += 1
            count = int(accepted[acceptor.key][anchor])
            replayed = min(count + 1, response.num_drafted - anchor)
            if replayed != pass_record.num_emitted:
                depth = min(replayed, pass_record.num_emitted)  # the first depth they disagree on
                gap = decisions.gap_nats(anchor, depth, acceptor)
                differing.append(
                    DifferingPass(
                        row.sample_id,
                        acceptor.name,
                        acceptor.budget,
                        anchor,
                        pass_record.num_emitted,
                        replayed,
                        gap,
                    )
                )
    replay_passes = {
        acceptor.key: replay_walk(accepted[acceptor.key].tolist(), response.num_drafted)
        for acceptor, _ in decodes
    }
    return Parity(num_passes, num_passes - len(differing), differing, replay_passes)


def _decide(
    drafter: Drafter,
    head: TargetHead,
    row: FeatureRow,
    response: Response,
    options: ReplayOptions,
) -> Decisions:
    wider = options.max_budget + 1  # the first prefix outside the tree is the rival of one inside
    scores = score_anchors(
        drafter,
        head,
        row,
        response,
        range(response.num_drafted),
        wider,
        slot_temperatures(options.drafter_temperature, drafter.config.block_size - 1),
    )
    # M = B + 1 children rank as M = B do: a child of rank B + 1 is in no tree of budget B
    trees = build_trees(scores.top_log_probs, wider)
    ranks = ranks_in(trees, scores.gold_child_ranks, scores.num_gold)
    return Decisions(scores, trees, ranks, options.cost)
