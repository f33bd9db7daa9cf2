"""The drafter's opinion of a recorded response: for every anchor, the log-probs of what it drafts and of what came.

Shapes: S tokens of the row, N anchors, K block size, L = K-1 slots, D taps, H hidden, V vocabulary, M children kept a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.features import FeatureRow
from drafter.head import SparseLogProbs, log_probs_at
from drafter.model import BlockLayout, Drafter, block_embeddings
from target.head import TargetHead


@dataclass(frozen=True)
class Response:
    """The record r_0..r_n of one response: `first` is r_0's position in the row, `num_drafted` is n.

    r_0 is prefill's token, so n tokens are left for verify passes, and r_0..r_{n-1} are the possible anchors.
    """

    first: int
    num_drafted: int


@dataclass(frozen=True)
class SlotScores:
    """Slot k of anchor i predicts r_{i+k}; only the first num_gold slots of an anchor have a recorded token."""

    top_log_probs: Tensor
    """(N, L, M) float32, the likeliest tokens of a slot, falling."""
    gold_log_probs: Tensor
    """(N, L) float32, of the recorded tokens."""
    gold_child_ranks: Tensor
    """(N, L) int64, index of the recorded token among the M, or M when it is not there."""
    num_gold: Tensor
    """(N,) int64"""


def find_responses(loss_mask: Tensor, max_new_tokens: int | None = None) -> list[Response]:
    """Every run of `loss_mask` (S,) bool, cut as decoding would at `max_new_tokens`; runs of one token have no pass."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1), append=torch.zeros(1)).tolist()
    starts = [position for position, edge in enumerate(edges) if edge == 1]
    ends = [position for position, edge in enumerate(edges) if edge == -1]
    limit = max_new_tokens or len(loss_mask)
    runs = [
        Response(start, min(end - start, limit) - 1)
        for start, end in zip(starts, ends, strict=True)
    ]
    return [run for run in runs if run.num_drafted > 0]


@dataclass(frozen=True, eq=False)
class DraftedBlocks:
    """What the drafter made of some anchors, before the vocabulary: any number of temperatures is scored from it."""

    hidden: Tensor  # (N, L, H)
    gold: Tensor  # (N, L); beyond num_gold of no meaning
    num_gold: Tensor  # (N,)

    def scores(
        self,
        head: TargetHead,
        num_children: int,
        temperatures: Sequence[Tensor],
        head_chunk_rows: int = 1024,
    ) -> list[SlotScores]:
        """At each of `temperatures`, (L,) float32 of the slots; one product with the head for all."""
        return score_slots(
            self.hidden,
            self.gold,
            self.num_gold,
            head,
            num_children,
            temperatures,
            head_chunk_rows,
        )


def draft_anchors(
    drafter: Drafter, head: TargetHead, row: FeatureRow, response: Response, anchors: range
) -> DraftedBlocks:
    """The blocks of the anchors r_i, i in `anchors`: one drafter forward."""
    device, config = head.head.device, drafter.config
    num_slots = config.block_size - 1
    input_ids = row.input_ids.to(device)
    positions = response.first + torch.arange(anchors.start, anchors.stop, device=device)  # (N,)
    last = response.first + response.num_drafted
    slots = torch.arange(1, config.block_size, device=device)
    return DraftedBlocks(
        slot_states(drafter, head, row, positions),
        input_ids[(positions[:, None] + slots).clamp(max=last)],
        (last - positions).clamp(max=num_slots),
    )


def score_anchors(
    drafter: Drafter,
    head: TargetHead,
    row: FeatureRow,
    response: Response,
    anchors: range,
    num_children: int,
    temperatures: Tensor | None = None,
    head_chunk_rows: int = 1024,
) -> SlotScores:
    """Scores of the anchors r_i, i in `anchors`: one drafter forward, and one pass over the vocabulary for each slot.

    temperatures: (L,) float32 of the slots; None: 1.
    """
    if temperatures is None:
        temperatures = torch.ones(drafter.config.block_size - 1)
    drafted = draft_anchors(drafter, head, row, response, anchors)
    return drafted.scores(head, num_children, [temperatures], head_chunk_rows)[0]


def score_slots(
    hidden: Tensor,
    gold: Tensor,
    num_gold: Tensor,
    head: TargetHead,
    num_children: int,
    temperatures: Sequence[Tensor],
    head_chunk_rows: int = 1024,
) -> list[SlotScores]:
    """Scores of blocks whose slot states are known: hidden (N, L, H), gold (N, L), num_gold (N,); at each of `temperatures`, (L,)
    float32 of the slots, with one product with the head for all."""
    num_children = min(num_children, len(head.head))
    found = log_probs_at(
        hidden.flatten(0, 1),
        head.head,
        gold.reshape(-1, 1),
        num_children,
        [values.to(hidden.device).repeat(len(hidden)) for values in temperatures],
        head_chunk_rows,
    )
    return [_of_slots(scored, gold, num_gold, num_children) for scored in found]


def _of_slots(
    found: SparseLogProbs, gold: Tensor, num_gold: Tensor, num_children: int
) -> SlotScores:
    assert found.top_log_probs is not None
    assert found.top_ids is not None
    is_gold = found.top_ids.view(*gold.shape, num_children) == gold[..., None]
    return SlotScores(
        top_log_probs=found.top_log_probs.view(*gold.shape, num_children),
        gold_log_probs=found.log_probs.view(gold.shape),
        gold_child_ranks=torch.where(is_gold.any(-1), is_gold.int().argmax(-1), num_children),
        num_gold=num_gold,
    )


def slot_states(drafter: Drafter, head: TargetHead, row: FeatureRow, positions: Tensor) -> Tensor:
    """Hidden states of slots 1..K-1 of the blocks whose anchors stand at `positions` (N,), (N, L, H); the row is one document."""
    config, dtype, device = drafter.config, drafter.fc.weight.dtype, positions.device
    input_ids, features = row.input_ids.to(device), row.features.to(device)
    layout = BlockLayout(
        context_positions=torch.arange(len(input_ids), device=features.device)[None],
        context_documents=torch.zeros_like(input_ids)[None],
        anchor_positions=positions[None],
        anchor_documents=torch.zeros_like(positions)[None],
    )
    blocks = block_embeddings(
        head.embedding, input_ids[positions][None], config.mask_token_id, config.block_size
    )
    return drafter(features[None].to(dtype), blocks.to(dtype), layout)[0, :, 1:]
