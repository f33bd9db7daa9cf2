"""Where blocks start in a document, and what their slots must predict.

N anchors, K block size. A position p may be an anchor if the target generated both p and p+1; slot k of its block has a
label while p+1..p+k were all generated, so a gap in the loss mask, or the document's end, ends the block's labels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """The blocks of one document in one epoch."""

    positions: Tensor  # (N,) int64, increasing
    labels: Tensor  # (N, K-1) int64, 0 where there is no label
    label_mask: Tensor  # (N, K-1) bool, a prefix of every row, at least one slot long
    num_candidates: int
    """Positions of the document that may be an anchor."""
    num_at_starts: int
    """Anchors at the `starts` they were drawn with."""


def sample_anchors(
    input_ids: Tensor,
    loss_mask: Tensor,
    block_size: int,
    num_anchors: int,
    seed: int,
    epoch: int,
    sample_id: str,
    starts: Tensor | None = None,
    start_share: float = 0.0,
) -> Anchors:
    """At most `num_anchors` anchors drawn without replacement; a function of its arguments alone, never of the ranks.

    input_ids, loss_mask: (S,). N is 0 for a document with no two neighbouring response tokens. starts: positions of which
    `start_share` of the anchors are drawn first, or all if there are fewer, and then the rest uniformly from what remains, of
    which some are starts too; None: all are drawn uniformly.
    """
    candidates = anchor_candidates(loss_mask)
    generator = _generator(seed, epoch, sample_id)
    order = torch.randperm(len(candidates), generator=generator)
    drawn = candidates[order]
    is_start = torch.zeros_like(drawn, dtype=torch.bool)
    if starts is not None:
        is_start = torch.isin(drawn, starts)
        first = is_start & (is_start.cumsum(0) <= round(start_share * num_anchors))
        rest = (~first).nonzero().flatten()
        # in an order of its own: in the first one a start that is left over comes late, because it is left over
        rest = rest[torch.randperm(len(rest), generator=generator)]
        chosen = torch.cat([first.nonzero().flatten(), rest])
        drawn, is_start = drawn[chosen], is_start[chosen]
    positions = drawn[:num_anchors].sort().values
    slots = positions[:, None] + torch.arange(1, block_size)  # (N, K-1)
    inside = slots < len(input_ids)
    slots = slots.clamp(max=len(input_ids) - 1)
    label_mask = (inside & loss_mask[slots]).cumprod(1).bool()
    return Anchors(
        positions,
        input_ids[slots].masked_fill(~label_mask, 0),
        label_mask,
        len(candidates),
        int(is_start[:num_anchors].sum()),
    )


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """(C,) int64 positions p with loss_mask[p] and loss_mask[p+1], increasing."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().flatten()


def _generator(seed: int, epoch: int, sample_id: str) -> torch.Generator:
    digest = hashlib.sha256(f"anchors {seed} {epoch} {sample_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
