"""Some rows of a corpus, in its order, as if they were a corpus of their own: what is streamed, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.progress import Progress
from configs.schema import TrainSection
from data.corpus import REMEDY, CorpusManifest, CorpusRow
from data.corpus_rows import CorpusRows, read_column
from extract.batches import ShardCut, cut_lengths

RowsKind = Literal["held-out", "by-split"]


class SelectedRows:
    """Not for several threads at once."""

    def __init__(self, folder: Path, manifest: CorpusManifest, numbers: np.ndarray):
        """numbers: positions in the corpus, rising within any part that is read at once. Raises as CorpusRows."""
        self.folder, self.manifest, self.numbers = folder, manifest, numbers
        self._rows = CorpusRows(folder, manifest)
        self.lengths: np.ndarray = self._rows.lengths[numbers]
        """Tokens of each."""

    def read(self, start: int, stop: int) -> list[CorpusRow]:
        """The selected rows number start..stop-1. Raises as CorpusRows.read."""
        if start == stop:
            return []
        first = int(self.numbers[start])
        rows = self._rows.read(first, int(self.numbers[stop - 1]) + 1)
        return [rows[number - first] for number in self.numbers[start:stop].tolist()]

    def column(self, name: str) -> np.ndarray:
        """Of the corpus (data/corpus.py), for these rows; nothing else is read."""
        return read_column(self.folder, self.manifest, name)[self.numbers]

    def token_ids(self) -> np.ndarray:
        """(n,) int64, rising: every token id that occurs in these rows. Raises ValueError if a shard cannot be read."""
        progress = Progress("tokens of the corpus", len(self.manifest.shards), "shards")
        found, first = np.zeros(0, np.int64), 0
        for shard in self.manifest.shards:
            start, stop = np.searchsorted(self.numbers, [first, first + shard.num_rows])
            ids = _read_ids(self.folder / shard.file).take(self.numbers[start:stop] - first)
            found = np.union1d(found, np.unique(ids.flatten().to_numpy()))
            first += shard.num_rows
            progress.advance()
        return found.astype(np.int64)


def _read_ids(path: Path) -> pa.Array:
    try:
        return pq.read_table(path, columns=["input_ids"])["input_ids"].combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"corpus shard {path} cannot be read: {error}; {REMEDY}") from error


def training_rows(folder: Path, manifest: CorpusManifest) -> SelectedRows:
    return SelectedRows(folder, manifest, np.flatnonzero(_is_training(folder, manifest)))


@dataclass(frozen=True)
class StoredRows:
    """The rows of a features folder, in the order of its shards."""

    rows: CorpusRows | SelectedRows
    num_first: int
    """A shard ends after so many rows: those before are of one kind, those behind of another. 0: all are of one."""

    def cut(self, max_tokens: int) -> list[ShardCut]:
        """Shards of at most `max_tokens` (extract/batches.py)."""
        lengths = self.rows.lengths.tolist()
        first = cut_lengths(lengths[: self.num_first], max_tokens)
        return first + [
            ShardCut(
                len(first) + cut.index,
                self.num_first + cut.start,
                self.num_first + cut.stop,
                cut.num_tokens,
            )
            for cut in cut_lengths(lengths[self.num_first :], max_tokens)
        ]


def stored_rows(folder: Path, manifest: CorpusManifest, kind: RowsKind | None) -> StoredRows:
    """kind: `rows` of the features' settings (rows_kind); None: all rows in corpus order.

    held-out: validation and test alone, beside a stream. by-split: the training rows, then the others, so that shards of
    training rows are a stream's blocks, row for row and batch for batch.
    """
    if kind is None:
        return StoredRows(CorpusRows(folder, manifest), 0)
    is_training = _is_training(folder, manifest)
    held_out = np.flatnonzero(~is_training)
    if kind == "held-out":
        return StoredRows(SelectedRows(folder, manifest, held_out), 0)
    training = np.flatnonzero(is_training)
    numbers = np.concatenate([training, held_out])
    return StoredRows(SelectedRows(folder, manifest, numbers), len(training))


def rows_kind(train: TrainSection) -> RowsKind | None:
    """What a recipe's features folder holds, and in which order."""
    if train.source != "shards":
        return "held-out"
    return "by-split" if train.shuffle_window else None


def _is_training(folder: Path, manifest: CorpusManifest) -> np.ndarray:
    return read_column(folder, manifest, "split") == "train"
