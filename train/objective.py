"""From hidden states of the blocks to the loss, through the target's head in chunks: logits never exist whole.

B sequences, N anchors, K block size, L = K-1 slots, H hidden, V vocabulary, M blocks with a label, P soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.build import build_trees, tree_thresholds
from ddtree.replay import ranks_in
from drafter.head import SparseLogProbs, sparse_log_probs
from train.batches import MicroBatch
from train.losses import LossMix, SlotStatistics, SoftStatistics, TreeStatistics, sharpened
from train.schedule import LossPhase


@dataclass(frozen=True)
class BatchSums:
    """Sums over blocks, to be added over micro-batches and ranks before anything is divided."""

    weight: float = 0.0
    """Sum of slot weights."""
    loss: float = 0.0
    """Sum of loss terms: weight times cross-entropy or another distance, nats."""
    slots: float = 0.0
    """Slots with a label."""
    blocks: float = 0.0
    """Blocks with a label."""
    chain: float = 0.0
    """Leading slots whose label is the drafter's first choice."""
    tree: float = 0.0
    """Prefixes of labels inside the tree of `train.tree_budget`; 0 while the loss builds no tree."""
    tree_blocks: float = 0.0
    """Blocks whose tree was built."""
    tokens: float = 0.0
    """Document tokens."""
    candidates: float = 0.0
    """Positions that could have been an anchor."""
    at_starts: float = 0.0
    """Anchors at starts of real walks."""
    context: float = 0.0
    """Context tokens in forwards."""
    padded_context: float = 0.0
    """The same with their padding."""

    @classmethod
    def of(cls, values: Tensor) -> BatchSums:
        """values: (12,) float64 in the order of the fields."""
        return cls(*values.tolist())

    def tensor(self) -> Tensor:
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)


def micro_batch_loss(
    hidden: Tensor,
    head: Tensor,
    batch: MicroBatch,
    mix: LossMix,
    phase: LossPhase,
    normaliser: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """The loss terms of this micro-batch, added up, / `normaliser`, and its BatchSums as a tensor (12,) float64.

    hidden: (B, N, K, H) of the drafter; head: (V, H) of the target.
    """
    live = batch.label_mask.any(-1)  # (B, N)
    if not live.any():
        sums = torch.cat([torch.zeros(7, dtype=torch.float64), _batch_counts(batch)])
        return hidden.float().sum() * 0.0, sums.to(head.device)
    slots = _slot_statistics(hidden, head, batch, live, mix, phase, chunk_rows)
    if slots is None:
        # no tree can be built: say so through the loss, on which all ranks agree before the optimizer moves
        broken = hidden.float().sum() * torch.nan
        return broken, broken.detach().double().expand(len(vars(BatchSums())))
    found = mix.terms(slots, phase.share, phase.surrogate_nats)
    loss = found.terms.sum()
    with torch.no_grad():
        counts = _batch_counts(batch).to(loss.device)
        sums = torch.cat([_sums(loss, found.weights, slots), counts])
    return loss / normaliser, sums


def _slot_statistics(
    hidden: Tensor,
    head: Tensor,
    batch: MicroBatch,
    live: Tensor,
    mix: LossMix,
    phase: LossPhase,
    chunk_rows: int,
) -> SlotStatistics | None:
    """What the losses look at, for the blocks in `live` (B, N); None if a log-prob is not finite."""
    labels, mask = batch.labels[live], batch.label_mask[live]  # (M, L)
    asked = labels[..., None]
    soft = batch.soft if mix.needs_soft and phase.share > 0 else None
    assert soft is not None or not (mix.needs_soft and phase.share > 0), (
        "features without soft labels"
    )
    if soft is not None:
        asked = torch.cat([asked, soft.token_ids[live]], -1)  # (M, L, 1+P)
    budgets = mix.budgets if phase.share > 0 else ()
    scored = sparse_log_probs(
        hidden[live][:, 1:].flatten(0, 1),  # slot 0 is the anchor and is never supervised
        head,
        asked.flatten(0, 1),
        top_k=min(max(budgets, default=1), len(head)),
        chunk_rows=chunk_rows,
    )
    if not scored.log_probs.isfinite().all():
        return None
    log_probs = scored.log_probs.view(asked.shape)
    assert scored.top_ids is not None
    ranks = child_ranks(scored.top_ids.view(*labels.shape, -1), labels)
    return SlotStatistics(
        log_probs=log_probs[..., 0],
        mask=mask,
        is_first=ranks == 0,
        tree=_tree_statistics(scored, ranks, mask, mix) if budgets else None,
        soft=soft and _soft_statistics(soft.log_probs[live], log_probs[..., 1:], mix),
    )


def _soft_statistics(stored: Tensor, log_probs: Tensor, mix: LossMix) -> SoftStatistics:
    power = mix.soft_label_sharpness
    return SoftStatistics(stored if power == 1 else sharpened(stored, power), log_probs)


def child_ranks(top_ids: Tensor, labels: Tensor) -> Tensor:
    """(M, L) int64, the place of each label in its slot's list (M, L, k), or k where it is not listed."""
    found, place = (top_ids == labels[..., None]).max(-1)
    return torch.where(found, place, top_ids.shape[-1])


def _tree_statistics(
    scored: SparseLogProbs, ranks: Tensor, mask: Tensor, mix: LossMix
) -> TreeStatistics:
    assert scored.top_log_probs is not None
    trees = build_trees(scored.top_log_probs.view(*mask.shape, -1), max(mix.budgets))
    places = ranks_in(trees, ranks, mask.sum(1))
    of_surrogate = mix.surrogate_budgets if "tree_surrogate" in mix.losses else ()
    return TreeStatistics(
        # by place, never by comparing scores: DESIGN section 6
        in_tree=places <= mix.tree_budget,
        threshold=tree_thresholds(trees, [mix.tree_budget])[:, 0],
        surrogate_thresholds=tree_thresholds(trees, of_surrogate),
    )


def _batch_counts(batch: MicroBatch) -> Tensor:
    """(5,) float64, the last fields of BatchSums: tokens and what follows."""
    documents = batch.layout.context_documents
    used = int((documents >= 0).sum()) if batch.num_tokens else 0
    padded = documents.numel() if batch.num_tokens else 0
    values = [batch.num_tokens, batch.num_candidates, batch.num_at_starts, used, padded]
    return torch.tensor(values, dtype=torch.float64)


def _sums(loss: Tensor, weights: Tensor, slots: SlotStatistics) -> Tensor:
    """(7,) float64, the first fields of BatchSums."""
    mask = slots.mask
    zero = loss.new_zeros(())
    blocks = zero + len(mask)
    values = [
        weights.sum(),
        loss,
        mask.sum(),
        blocks,
        (slots.is_first & mask).cumprod(1).sum(),
        zero if slots.tree is None else (slots.tree.in_tree & mask).sum(),
        zero if slots.tree is None else blocks,
    ]
    return torch.stack([value.double() for value in values])
