"""From hidden states of the blocks to the loss, through the target's head in chunks: logits never exist whole.

B sequences, N anchors, K block size, L = K-1 slots, H hidden, V vocabulary, M blocks with a label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.build import tree_thresholds
from drafter.head import SparseLogProbs, sparse_log_probs
from train.batches import MicroBatch
from train.losses import Weighting


@dataclass(frozen=True)
class BatchSums:
    """Sums over blocks, to be added over micro-batches and ranks before anything is divided."""

    weight: float = 0.0
    """Sum of slot weights."""
    weighted_ce: float = 0.0
    """Sum of weight times cross-entropy, nats."""
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

    @classmethod
    def of(cls, values: Tensor) -> BatchSums:
        """values: (8,) float64 in the order of the fields."""
        return cls(*values.tolist())

    def tensor(self) -> Tensor:
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)


def micro_batch_loss(
    hidden: Tensor,
    head: Tensor,
    batch: MicroBatch,
    weighting: Weighting,
    share: float,
    normaliser: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """sum of w times cross-entropy over this micro-batch / `normaliser`, and its BatchSums as a tensor (8,) float64.

    hidden: (B, N, K, H) of the drafter; head: (V, H) of the target; share: see `schedule.loss_share`.
    """
    live = batch.label_mask.any(-1)  # (B, N)
    if not live.any():
        return hidden.float().sum() * 0.0, BatchSums(tokens=batch.num_tokens).tensor().to(
            head.device
        )
    labels, mask = batch.labels[live], batch.label_mask[live]  # (M, L)
    has_tree = weighting.needs_tree(share)
    num_children = min(weighting.budget, len(head)) if has_tree else 1
    scored = sparse_log_probs(
        hidden[live][:, 1:].flatten(0, 1),  # slot 0 is the anchor and is never supervised
        head,
        labels.flatten()[:, None],
        top_k=num_children,
        chunk_rows=chunk_rows,
    )
    log_probs = scored.log_probs.view(labels.shape)
    if not log_probs.isfinite().all():
        # no tree can be built: say so through the loss, on which all ranks agree before the optimizer moves
        broken = hidden.float().sum() * torch.nan
        return broken, broken.detach().double().expand(len(vars(BatchSums())))
    thresholds = _thresholds(scored, mask, weighting) if has_tree else None
    weights = weighting.weights(log_probs, mask, thresholds, share)
    loss = -(weights * log_probs).sum()
    with torch.no_grad():
        sums = _sums(loss, weights, log_probs, labels, mask, thresholds, scored, batch.num_tokens)
    return loss / normaliser, sums


def _thresholds(scored: SparseLogProbs, mask: Tensor, weighting: Weighting) -> Tensor:
    """(M,) score of the last node of each block's tree."""
    assert scored.top_log_probs is not None
    top = scored.top_log_probs.view(*mask.shape, -1)  # (M, L, B)
    return tree_thresholds(top, [weighting.budget])[:, 0]


def _sums(
    loss: Tensor,
    weights: Tensor,
    log_probs: Tensor,
    labels: Tensor,
    mask: Tensor,
    thresholds: Tensor | None,
    scored: SparseLogProbs,
    num_tokens: int,
) -> Tensor:
    assert scored.top_ids is not None
    hits = (scored.top_ids[:, 0].view(labels.shape) == labels) & mask
    zero = loss.new_zeros(())
    blocks = zero + len(mask)
    in_tree = None if thresholds is None else (log_probs.cumsum(1) >= thresholds[:, None]) & mask
    values = [
        weights.sum(),
        loss,
        mask.sum(),
        blocks,
        hits.cumprod(1).sum(),
        zero if in_tree is None else in_tree.sum(),
        zero if in_tree is None else blocks,
        zero + num_tokens,
    ]
    return torch.stack([value.double() for value in values])
