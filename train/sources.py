"""Where a batch's features come from: shards that are there, a stream that another process fills, or the target itself.

The order of samples (train/order.py) knows nothing of it, so all three give the same batches, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from data.codecs import decoded_dtype
from data.feature_shards import FeatureLayout, FeatureRow, StoredRow
from data.features import FeatureSet, RowEntry
from data.soft_labels import SoftLabels
from train.order import Sample

AnyRow = FeatureRow | StoredRow
OwnSamples = Callable[[int], Sequence[Sample]]
"""Samples of the step that starts at a sample number which this rank reads."""


class Source(Protocol):
    """Rows of the samples of one rank. `prepare` and `read` are called by the thread that reads ahead, the rest by the loop."""

    def prepare(self, consumed: int, own: OwnSamples) -> None:
        """Before the rows of the step at sample `consumed` are read, on every rank: may take as long as it takes.

        Raises SourceClosed if the run stops meanwhile.
        """

    def read(self, entry: RowEntry) -> AnyRow:
        """Raises ValueError in one line naming shard and row if it cannot be read."""
        ...

    def trained(self, samples: int) -> None:
        """Every rank has trained on the samples before number `samples`, or continues there."""

    def saved(self, samples: int) -> None:
        """A checkpoint has seen them: no later run will ask for them again."""

    def close(self) -> None:
        """End a `prepare` that waits. The loop is leaving."""


class SourceClosed(RuntimeError):
    """The run stops while its source still waits for features."""


class ShardSource(Source):
    """Feature shards of all rows."""

    def __init__(self, features: FeatureSet):
        """features: used by this source alone, which reads in another thread."""
        self.features = features

    def read(self, entry: RowEntry) -> AnyRow:
        return self.features.read_stored(entry)


class WindowedShards(Source):
    """Feature shards of all rows, read in the order of streams, whose entries come from the corpus."""

    def __init__(self, features: FeatureSet):
        self.features = features
        self.found = {entry.sample_id: entry for entry in features.of_split("train")}

    def read(self, entry: RowEntry) -> AnyRow:
        found = self.found.get(entry.sample_id)
        if found is None:
            return absent_row(entry, self.features.layout)
        return self.features.read_stored(found)


def absent_row(entry: RowEntry, layout: FeatureLayout) -> FeatureRow:
    """What stands for a row that failed its checks at extraction: a document without tokens, so without anchors.

    It keeps its place in the batch, which is cut before anybody can know, on every rank and for every source alike.
    """
    shape = (0, layout.num_taps, layout.hidden_size)
    soft = (0, layout.num_soft_labels)
    return FeatureRow(
        sample_id=entry.sample_id,
        source=entry.source,
        task=entry.task,
        split=entry.split,
        input_ids=torch.zeros(0, dtype=torch.int64),
        loss_mask=torch.zeros(0, dtype=torch.bool),
        features=torch.zeros(shape, dtype=decoded_dtype(layout.codec)),
        soft_labels=SoftLabels(torch.zeros(soft, dtype=torch.int64), torch.zeros(soft))
        if layout.num_soft_labels
        else None,
    )
