"""Feature shards as a set: their entries in corpus order, random access to any row.

features/manifest.json, rows.parquet, quarantine.jsonl     data/feature_manifest.py
features/shard-000000.parquet ...                          data/feature_shards.py
features/target_head.safetensors                           the target's embedding and head, for stages that load no target
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from common.files import fields_of, sha256_file
from common.progress import Progress
from common.storage import Storage
from data.feature_manifest import (
    MANIFEST_FILE,
    REMEDY,
    FeatureManifest,
    RowEntry,
    ShardEntry,
    as_storage,
    iter_entries,
    read_feature_manifest,
    wrong_files,
)
from data.feature_shards import (
    FeatureLayout,
    FeatureRow,
    StoredRow,
    open_shard,
    read_entry_row,
    read_input_ids,
    read_soft_token_ids,
    read_stored_row,
)

REMADE = "delete it and run `./launch.sh extract` again: only what is missing is made again"
OPEN_SHARDS = 8


def layout_of(manifest: FeatureManifest) -> FeatureLayout:
    """Raises KeyError if the settings are not those of an extraction."""
    settings = manifest.settings
    return FeatureLayout(
        settings["codec"],
        len(settings["target_layer_ids"]),
        settings["hidden_size"],
        settings.get("soft_labels", 0),  # absent where none were asked for
    )


class FeatureSet:
    """Rows of all shards in corpus order. Opening reads the manifest, the rows' entries and file sizes only."""

    def __init__(self, storage: Storage, manifest: FeatureManifest):
        self.storage = storage
        self.settings = manifest.settings
        self.target_layer_ids: tuple[int, ...] = tuple(manifest.settings["target_layer_ids"])
        self.hidden_size: int = manifest.settings["hidden_size"]
        self.layout = layout_of(manifest)
        self._head = manifest.head
        self._copies = (
            contextlib.ExitStack()
        )  # local copies of a bucket's files; they go with this set
        self.entries = list(iter_entries(storage, manifest))
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()

    def checked_head(self) -> Path:
        """The file of the target's embedding and head, read through and compared with its sum: every loss and every
        acceptance goes through these numbers. Raises ValueError."""
        path = self._copies.enter_context(self.storage.local_copy(self._head.file))
        if sha256_file(path) != self._head.sha256:
            where = self.storage.location(self._head.file)
            raise ValueError(f"{where} differs from its sum in the manifest; {REMADE}")
        return path

    def of_split(self, split: str) -> list[RowEntry]:
        """Entries of `train`, `validation` or `test`, in corpus order."""
        return [entry for entry in self.entries if entry.split == split]

    def of_shard(self, shard: str) -> list[RowEntry]:
        """Entries of one file, in its order."""
        return [entry for entry in self.entries if entry.shard == shard]

    @property
    def location(self) -> str:
        """Where they are: what `open_features` takes."""
        return self.storage.url

    @property
    def folder(self) -> Path:
        """Of local features; raises ValueError for a bucket's."""
        if self.storage.folder is None:
            raise ValueError(f"{self.storage.url} is no folder here; copy the features to one")
        return self.storage.folder

    def read(self, entry: RowEntry) -> FeatureRow:
        """One row, read alone. Not for several threads at once: give each its own FeatureSet.

        Raises ValueError naming shard, row and remedy if the bytes are not the row's (pages carry checksums).
        """
        return self.read_stored(entry).decoded()

    def read_stored(self, entry: RowEntry) -> StoredRow:
        """`read`, its features still as they are stored, for who has a place to decode them to. Raises likewise."""
        try:
            row = read_stored_row(self._file(entry.shard), entry.row, self.layout)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._open.pop(entry.shard, None)
            raise self._unreadable(entry, str(error)) from error
        if (row.sample_id, len(row.input_ids)) != (entry.sample_id, entry.num_tokens):
            raise self._unreadable(entry, f"it holds sample {row.sample_id}")
        return row

    def read_input_ids(self, entry: RowEntry) -> Tensor:
        """(S,) int64 of one row, without its features. Raises as `read`."""
        try:
            return read_input_ids(self._file(entry.shard), entry.row)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._open.pop(entry.shard, None)
            raise self._unreadable(entry, str(error)) from error

    def read_soft_token_ids(self, entry: RowEntry) -> Tensor:
        """(S, P) int64, the soft labels' tokens of one row, without its features. Raises as `read`."""
        try:
            return read_soft_token_ids(self._file(entry.shard), entry.row)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._open.pop(entry.shard, None)
            raise self._unreadable(entry, str(error)) from error

    def _file(self, shard: str) -> pq.ParquetFile:
        file = self._open.pop(shard, None) or open_stored_shard(self.storage, shard)
        self._open[shard] = file  # newest last
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return file

    def _unreadable(self, entry: RowEntry, why: str) -> ValueError:
        return ValueError(
            f"feature shard {self.storage.location(entry.shard)}, row {entry.row} (sample {entry.sample_id}) "
            f"cannot be read: {why}; {REMADE}"
        )


def open_stored_shard(storage: Storage, shard: str) -> pq.ParquetFile:
    """A local file by its path, which Arrow reads without Python; an object through ranges, a row's in one request."""
    return open_shard(storage.folder / shard if storage.folder else storage.open(shard))


def rows_of_shard(storage: Storage, shard: ShardEntry) -> list[dict[str, str | int]]:
    """What rows.parquet says of a shard's rows, by the shard itself; no feature is read.

    Raises ValueError if it cannot be read, FileNotFoundError if it is not there.
    """
    try:
        with open_stored_shard(storage, shard.file) as file:
            return [read_entry_row(file, index) for index in range(shard.num_rows)]
    except pa.ArrowException as error:
        raise ValueError(f"{storage.location(shard.file)} cannot be read: {error}") from error


def open_features(location: Storage | Path | str) -> FeatureSet:
    """The features in a folder or under a URL. Raises FileNotFoundError or ValueError naming what is missing or cut off."""
    storage = as_storage(location)
    manifest = read_feature_manifest(storage, with_rows=False)
    if wrong := wrong_files(storage, manifest):
        raise ValueError(f"features in {storage.url}: {_first(wrong)}; {REMADE}")
    with fields_of(storage.location(MANIFEST_FILE), REMEDY):
        return FeatureSet(storage, manifest)


def verify_features(folder: Path) -> int:
    """Read every file and compare its sha256; gives the number of files.

    Raises ValueError naming the files that differ.
    """
    manifest = read_feature_manifest(folder, with_rows=False)
    wrong = wrong_files(folder, manifest)
    sums = {shard.file: shard.sha256 for shard in manifest.shards}
    sums[manifest.head.file] = manifest.head.sha256
    if manifest.rows is not None:
        sums[manifest.rows.file] = manifest.rows.sha256
    progress = Progress("verify features", len(sums), "files")
    for file, sha256 in sums.items():
        if (folder / file).is_file() and sha256_file(folder / file) != sha256:
            wrong.append(f"{file} has another sha256 than the manifest")
        progress.advance()
    if wrong:
        raise ValueError(f"features in {folder}: {_first(wrong)}; {REMADE}")
    progress.finish()
    return len(sums)


def _first(wrong: list[str]) -> str:
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return ", ".join(wrong[:5]) + more
