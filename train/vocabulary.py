"""The rows of the target's head that training's softmax runs over: all of them, or those of the corpus' own tokens.

V vocabulary, R rows kept, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.schema import TrainSection
from data.features import FeatureSet, RowEntry
from data.soft_labels import SoftLabels
from extract.selected_rows import SelectedRows
from train.batches import MicroBatch


@dataclass(frozen=True, eq=False)
class TrainingHead:
    weight: Tensor
    """(R, H)."""
    row_of: Tensor | None = None
    """(V,) int64, the row of a token id; None if every token has its own."""

    def labels(self, token_ids: Tensor) -> Tensor:
        """Rows of `weight` for token ids of any shape; a token that has none (it is no label) gets row 0."""
        return token_ids if self.row_of is None else self.row_of[token_ids]

    def relabel(self, batch: MicroBatch) -> MicroBatch:
        """The batch with rows of `weight` for token ids."""
        soft = batch.soft and SoftLabels(self.labels(batch.soft.token_ids), batch.soft.log_probs)
        return replace(batch, labels=self.labels(batch.labels), soft=soft)


def training_head(
    head: Tensor, features: FeatureSet, entries: Sequence[RowEntry], train: TrainSection
) -> TrainingHead:
    """head: (V, H) of the target; entries: the rows trained on, prompts included, whose tokens `corpus` keeps."""
    if train.vocabulary == "target":
        return TrainingHead(head)
    kept = torch.zeros(len(head), dtype=torch.bool)
    for entry in entries:
        kept[features.read_input_ids(entry)] = True
        if train.needs_soft_labels:
            kept[features.read_soft_token_ids(entry)] = True
    return _head_of(head, kept)


def streamed_head(head: Tensor, rows: SelectedRows, train: TrainSection) -> TrainingHead:
    """The same for rows whose features are not there yet: `corpus` keeps the tokens of the corpus itself."""
    if train.vocabulary == "target":
        return TrainingHead(head)
    kept = torch.zeros(len(head), dtype=torch.bool)
    kept[torch.from_numpy(rows.token_ids())] = True
    return _head_of(head, kept)


def _head_of(head: Tensor, kept: Tensor) -> TrainingHead:
    """kept: (V,) bool."""
    token_ids = kept.nonzero()[:, 0]
    row_of = torch.zeros(len(head), dtype=torch.int64)
    row_of[token_ids] = torch.arange(len(token_ids))
    return TrainingHead(head[token_ids.to(head.device)], row_of.to(head.device))
