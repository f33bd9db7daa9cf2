"""Feature shards as a set: the manifest, its entries in corpus order, random access to any row.

features/manifest.json               the only truth: settings, shards (rows, bytes, sha256), quarantined rows, head
features/shard-000000.parquet ...    data/feature_shards.py
features/target_head.safetensors     the target's embedding and head, for stages that load no target
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from common.files import fields_of, read_json, sha256_file
from common.progress import Progress
from data.feature_shards import (
    FeatureLayout,
    FeatureRow,
    open_shard,
    read_input_ids,
    read_row,
    read_soft_token_ids,
)

FORMAT, VERSION = "dflash-features", 1
REMEDY = "run `./launch.sh extract` with this recipe"
REPAIR = "delete it and run `./launch.sh extract` again: only what is missing is made again"
OPEN_SHARDS = 8


@dataclass(frozen=True, slots=True)
class RowEntry:
    """Where a row is and what can be known without reading it."""

    sample_id: str
    source: str
    task: str
    split: str
    num_tokens: int
    num_response_tokens: int
    shard: str
    """File name in the features folder."""
    row: int
    """Row group in the shard."""


@dataclass(frozen=True)
class ShardEntry:
    file: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    sha256: str
    rows: list[dict[str, Any]]
    """RowEntry's fields but shard and row, in the shard's order."""


@dataclass(frozen=True)
class HeadEntry:
    file: str
    sha256: str


@dataclass(frozen=True)
class QuarantinedRow:
    """A corpus row whose features failed a check: in no shard, never trained on."""

    sample_id: str
    shard: str
    """The shard it would be in."""
    reason: str


@dataclass(frozen=True)
class FeatureManifest:
    settings: dict[str, Any]
    shards: list[ShardEntry]
    quarantined: list[QuarantinedRow]
    head: HeadEntry

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def manifest_path(folder: Path) -> Path:
    return folder / "manifest.json"


def read_feature_manifest(folder: Path) -> FeatureManifest:
    """Raises FileNotFoundError or ValueError in one line if there is none, or none of this version."""
    path = manifest_path(folder)
    value = read_json(path, REMEDY)
    if not isinstance(value, dict) or (value.get("format"), value.get("version")) != (
        FORMAT,
        VERSION,
    ):
        raise ValueError(f"{path} is no {FORMAT} manifest of version {VERSION}; {REMEDY}")
    with fields_of(path, REMEDY):
        return FeatureManifest(
            settings=value["settings"],
            shards=[ShardEntry(**shard) for shard in value["shards"]],
            quarantined=[QuarantinedRow(**row) for row in value["quarantined"]],
            head=HeadEntry(**value["head"]),
        )


def wrong_files(folder: Path, manifest: FeatureManifest) -> list[str]:
    """What is missing or has another size than the manifest says; opens no file."""
    found = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    wrong = [
        f"{shard.file} has {found[shard.file]} bytes, not {shard.num_bytes}"
        if shard.file in found
        else f"{shard.file} is missing"
        for shard in manifest.shards
        if found.get(shard.file) != shard.num_bytes
    ]
    return wrong + [f"{manifest.head.file} is missing"] * (manifest.head.file not in found)


class FeatureSet:
    """Rows of all shards in corpus order. Opening reads the manifest and file sizes only."""

    def __init__(self, folder: Path, manifest: FeatureManifest):
        self.folder = folder
        self.settings = manifest.settings
        self.target_layer_ids: tuple[int, ...] = tuple(manifest.settings["target_layer_ids"])
        self.hidden_size: int = manifest.settings["hidden_size"]
        self.layout = FeatureLayout(
            manifest.settings["codec"],
            len(self.target_layer_ids),
            self.hidden_size,
            manifest.settings.get("soft_labels", 0),  # absent where none were asked for
        )
        self._head = manifest.head
        self.entries = [
            RowEntry(**row, shard=shard.file, row=index)
            for shard in manifest.shards
            for index, row in enumerate(shard.rows)
        ]
        self._open: OrderedDict[str, pq.ParquetFile] = OrderedDict()

    def checked_head(self) -> Path:
        """The file of the target's embedding and head, read through and compared with its sum: every loss and every
        acceptance goes through these numbers. Raises ValueError."""
        path = self.folder / self._head.file
        if sha256_file(path) != self._head.sha256:
            raise ValueError(f"{path} differs from its sum in the manifest; {REPAIR}")
        return path

    def of_split(self, split: str) -> list[RowEntry]:
        """Entries of `train`, `validation` or `test`, in corpus order."""
        return [entry for entry in self.entries if entry.split == split]

    def read(self, entry: RowEntry) -> FeatureRow:
        """One row, read alone. Not for several threads at once: give each its own FeatureSet.

        Raises ValueError naming shard, row and remedy if the bytes are not the row's (pages carry checksums).
        """
        try:
            row = read_row(self._file(entry.shard), entry.row, self.layout)
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
        file = self._open.pop(shard, None) or open_shard(self.folder / shard)
        self._open[shard] = file  # newest last
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return file

    def _unreadable(self, entry: RowEntry, why: str) -> ValueError:
        return ValueError(
            f"feature shard {self.folder / entry.shard}, row {entry.row} (sample {entry.sample_id}) "
            f"cannot be read: {why}; {REPAIR}"
        )


def open_features(folder: Path) -> FeatureSet:
    """The features in `folder`. Raises FileNotFoundError or ValueError naming what is missing or cut off."""
    manifest = read_feature_manifest(folder)
    if wrong := wrong_files(folder, manifest):
        raise ValueError(f"features in {folder}: {_first(wrong)}; {REPAIR}")
    with fields_of(manifest_path(folder), REMEDY):
        return FeatureSet(folder, manifest)


def verify_features(folder: Path) -> int:
    """Read every file and compare its sha256; gives the number of files.

    Raises ValueError naming the files that differ.
    """
    manifest = read_feature_manifest(folder)
    wrong = wrong_files(folder, manifest)
    sums = {shard.file: shard.sha256 for shard in manifest.shards}
    sums[manifest.head.file] = manifest.head.sha256
    progress = Progress("verify features", len(sums), "files")
    for file, sha256 in sums.items():
        if (folder / file).is_file() and sha256_file(folder / file) != sha256:
            wrong.append(f"{file} has another sha256 than the manifest")
        progress.advance()
    if wrong:
        raise ValueError(f"features in {folder}: {_first(wrong)}; {REPAIR}")
    progress.finish()
    return len(sums)


def _first(wrong: list[str]) -> str:
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return ", ".join(wrong[:5]) + more
