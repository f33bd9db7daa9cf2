"""Rows of a finished corpus by position, for readers that want some of them and not in one pass.

A position is a row's place in corpus order. Opening reads one small column; a shard's file is compared with its sum when
its first row is read, and a row group stays in memory for the next call.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.corpus import REMEDY, CorpusManifest, CorpusRow, ShardEntry, require_sum, rows_of


def read_column(folder: Path, manifest: CorpusManifest, name: str) -> np.ndarray:
    """(R,) of one column, say `num_tokens` or `split`, of all rows in corpus order; nothing else is read.

    Raises ValueError or FileNotFoundError if a shard is missing or its rows or tokens are not what the manifest says.
    """
    return np.concatenate(
        [_shard_column(folder / shard.file, shard, name) for shard in manifest.shards]
    )


class CorpusRows:
    """Random access to a corpus. Not for several threads at once."""

    def __init__(self, folder: Path, manifest: CorpusManifest):
        """Raises as `read_column`."""
        self.folder, self.shards = folder, manifest.shards
        self.lengths: np.ndarray = read_column(folder, manifest, "num_tokens")
        """(R,) int32, tokens of each row."""
        self._firsts = [0, *itertools.accumulate(shard.num_rows for shard in manifest.shards)]
        self._file: tuple[int, pq.ParquetFile] | None = None
        self._checked: set[int] = set()
        self._group: tuple[int, list[CorpusRow]] = (0, [])

    def read(self, start: int, stop: int) -> list[CorpusRow]:
        """Rows of positions start..stop-1. Raises ValueError or FileNotFoundError naming the shard that is not whole."""
        rows: list[CorpusRow] = []
        while start + len(rows) < stop:
            first, group = self._group_of(start + len(rows))
            at = start + len(rows) - first
            rows += group[at : at + stop - start - len(rows)]
        return rows

    def _group_of(self, position: int) -> tuple[int, list[CorpusRow]]:
        """The row group that holds `position`, after the position of its first row."""
        first, rows = self._group
        if not first <= position < first + len(rows):
            self._group = self._read_group(position)
        return self._group

    def _read_group(self, position: int) -> tuple[int, list[CorpusRow]]:
        index = int(np.searchsorted(self._firsts, position, side="right")) - 1
        file, first = self._open(index), self._firsts[index]
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if position < first + size:
                batches = file.read_row_group(group).to_batches()
                rows = [row for batch in batches for row in rows_of(batch)]
                self._require_lengths(index, first, rows)
                return first, rows
            first += size
        raise AssertionError(f"no row {position} in {self.shards[index].file}")

    def _open(self, index: int) -> pq.ParquetFile:
        if self._file is None or self._file[0] != index:
            path = self.folder / self.shards[index].file
            if index not in self._checked:
                require_sum(path, self.shards[index])
                self._checked.add(index)
            self._file = index, pq.ParquetFile(path)
        return self._file[1]

    def _require_lengths(self, index: int, first: int, rows: list[CorpusRow]) -> None:
        found = [row.num_tokens for row in rows]
        if found != self.lengths[first : first + len(rows)].tolist():
            raise ValueError(
                f"corpus shard {self.folder / self.shards[index].file} states other token counts than its rows have; {REMEDY}"
            )


def _shard_column(path: Path, shard: ShardEntry, name: str) -> np.ndarray:
    """Rows and tokens are compared with the manifest: cheap, and enough to cut by."""
    if not path.is_file():
        raise FileNotFoundError(f"corpus shard {path} is missing; {REMEDY}")
    try:
        with pq.ParquetFile(path) as file:
            table = file.read([*{"num_tokens", name}])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"corpus shard {path} cannot be read: {error}; {REMEDY}") from error
    found = table.num_rows, int(np.sum(table["num_tokens"].to_numpy()))
    if found != (shard.num_rows, shard.num_tokens):
        raise ValueError(
            f"corpus shard {path} has {found[0]} rows of {found[1]} tokens, not {shard.num_rows} of {shard.num_tokens}; {REMEDY}"
        )
    return table[name].to_numpy()
