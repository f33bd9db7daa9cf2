"""The manifest of feature shards: settings, sums, what became of every corpus row. The only truth about the folder.

    manifest.json        settings, shards with sums, quarantined rows; a sum over itself
    rows.parquet         RowEntry of every row, in corpus order: a million rows open in seconds. Its metadata holds the manifest
                         as well, so that either of the two can be made again from the other and the shards
    quarantine.jsonl     the quarantined rows once more, a line each, for people; only if there are any

Version 1 held the rows in manifest.json; it is still read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import fields_of, json_text, parse_json
from common.fingerprint import fingerprint
from common.storage import Storage, open_storage
from data.feature_shards import FeatureRow, StoredRow

FORMAT, VERSION, OLD_VERSION = "dflash-features", 2, 1
MANIFEST_FILE, ROWS_FILE, QUARANTINE_FILE = "manifest.json", "rows.parquet", "quarantine.jsonl"
REMEDY = "run `./launch.sh extract` with this recipe"
REPAIR = "run `./launch.sh verify-features FOLDER --repair`"

ROW_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("task", pa.string()),
        ("split", pa.string()),
        ("num_tokens", pa.int32()),
        ("num_response_tokens", pa.int32()),
    ]
)


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
    """RowEntry's fields but shard and row, in the shard's order; empty where they were not asked for."""


@dataclass(frozen=True)
class HeadEntry:
    file: str
    sha256: str


@dataclass(frozen=True)
class RowsEntry:
    file: str
    num_rows: int
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
    first_rows: dict[str, Any] | None = None
    """What the corpus' first rows said about the target (extract/checks.py); None: made before it was kept."""
    rows: RowsEntry | None = None
    """None: version 1, or not written yet."""

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """As version 1 spelled it, rows and all: sidecars and tests."""
        value = asdict(replace(self, first_rows=None, rows=None))
        kept = {key: value[key] for key in ("settings", "shards", "quarantined", "head")}
        return {"format": FORMAT, "version": OLD_VERSION, **kept}


def entry_row(row: FeatureRow | StoredRow) -> dict[str, str | int]:
    """What a ShardEntry says of a row."""
    return {
        "sample_id": row.sample_id,
        "source": row.source,
        "task": row.task,
        "split": row.split,
        "num_tokens": len(row.input_ids),
        "num_response_tokens": int(row.loss_mask.sum()),
    }


def as_storage(location: Storage | Path | str) -> Storage:
    return location if isinstance(location, Storage) else open_storage(location)


def manifest_path(folder: Path) -> Path:
    return folder / MANIFEST_FILE


def write_feature_manifest(
    location: Storage | Path | str, manifest: FeatureManifest
) -> FeatureManifest:
    """Write rows.parquet and quarantine.jsonl, then manifest.json; shards must hold their rows. Equal values, equal bytes."""
    storage = as_storage(location)
    data = rows_file(manifest)
    rows = RowsEntry(ROWS_FILE, manifest.num_rows, hashlib.sha256(data).hexdigest())
    manifest = replace(manifest, rows=rows)
    storage.write(ROWS_FILE, data)
    if manifest.quarantined:
        storage.write(QUARANTINE_FILE, quarantine_file(manifest))
    else:
        storage.delete(QUARANTINE_FILE)
    storage.write(MANIFEST_FILE, manifest_file(manifest))
    return manifest


def manifest_file(manifest: FeatureManifest) -> bytes:
    """manifest.json of this version."""
    assert manifest.rows is not None
    value = {**_head_of(manifest), "rows": asdict(manifest.rows)}
    return json_text({**value, "sum": fingerprint(value)}).encode()


def rows_file(manifest: FeatureManifest) -> bytes:
    """rows.parquet, from the shards' rows."""
    columns: dict[str, list[Any]] = {name: [] for name in ROW_SCHEMA.names}
    for shard in manifest.shards:
        assert len(shard.rows) == shard.num_rows, shard.file
        for row in shard.rows:
            for name, values in columns.items():
                values.append(row[name])
    head = json.dumps(_head_of(manifest), ensure_ascii=False)
    schema = ROW_SCHEMA.with_metadata({"format": "dflash-feature-rows", "manifest": head})
    buffer = io.BytesIO()
    pq.write_table(
        pa.table(columns, schema=schema),
        buffer,
        compression="zstd",
        use_dictionary=["source", "task", "split"],  # pyright: ignore[reportArgumentType]  # bool or list
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()


def quarantine_file(manifest: FeatureManifest) -> bytes:
    """quarantine.jsonl, in corpus order."""
    lines = (json.dumps(asdict(row), ensure_ascii=False) for row in manifest.quarantined)
    return "".join(f"{line}\n" for line in lines).encode()


def read_feature_manifest(
    location: Storage | Path | str, with_rows: bool = True
) -> FeatureManifest:
    """Raises FileNotFoundError or ValueError in one line if there is none, or none of a known version, or a damaged one.

    `with_rows`: whether the shards' entries hold their rows; a FeatureSet reads them by itself.
    """
    storage = as_storage(location)
    path = storage.location(MANIFEST_FILE)
    if storage.folder and (file := storage.folder / MANIFEST_FILE).exists() and not file.is_file():
        raise ValueError(f"{path} is no file; {REMEDY}")  # a pipe would be read for ever
    try:
        data = storage.read(MANIFEST_FILE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing; {REMEDY}") from error
    manifest = parse_manifest(data, path)
    if not with_rows or manifest.rows is None:
        return manifest
    table, start = read_rows_table(storage, manifest), 0
    shards = []
    for shard in manifest.shards:
        rows = table.slice(start, shard.num_rows).to_pylist()
        shards.append(replace(shard, rows=rows))
        start += shard.num_rows
    return replace(manifest, shards=shards)


def parse_manifest(data: bytes, path: str) -> FeatureManifest:
    """manifest.json of either version; `path` for messages. Raises ValueError."""
    value = parse_json(data, path, REMEDY)
    version = value.get("version") if isinstance(value, dict) else None
    if version not in (VERSION, OLD_VERSION) or value.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no {FORMAT} manifest of version {OLD_VERSION} or {VERSION}; {REMEDY}"
        )
    with fields_of(path, REMEDY):
        settings = value["settings"]
        if version == VERSION:
            found = value.pop("sum")
            if found != fingerprint(value):
                raise ValueError(f"{path} differs from the sum it holds of itself; {REPAIR}")
            rows = RowsEntry(**value["rows"])
            shards = [ShardEntry(**shard, rows=[]) for shard in value["shards"]]
        else:
            rows, shards = None, [ShardEntry(**shard) for shard in value["shards"]]
        return FeatureManifest(
            settings=settings,
            shards=shards,
            quarantined=[QuarantinedRow(**row) for row in value["quarantined"]],
            head=HeadEntry(**value["head"]),
            first_rows=value.get("first_rows"),
            rows=rows,
        )


def manifest_from_rows(data: bytes, path: str) -> FeatureManifest:
    """The manifest that rows.parquet holds of its own making, without the shards' rows. Raises ValueError."""
    try:
        metadata = pq.read_schema(pa.BufferReader(data)).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}; {REMEDY}") from error
    value = parse_json(metadata.get(b"manifest", b""), path, REMEDY)
    with fields_of(path, REMEDY):
        shards = [ShardEntry(**shard, rows=[]) for shard in value["shards"]]
        rows = RowsEntry(
            ROWS_FILE, sum(s.num_rows for s in shards), hashlib.sha256(data).hexdigest()
        )
        return FeatureManifest(
            settings=value["settings"],
            shards=shards,
            quarantined=[QuarantinedRow(**row) for row in value["quarantined"]],
            head=HeadEntry(**value["head"]),
            first_rows=value["first_rows"],
            rows=rows,
        )


def read_rows_table(storage: Storage, manifest: FeatureManifest) -> pa.Table:
    """ROW_SCHEMA's columns of all rows. Raises ValueError if the file is not the one of the manifest."""
    assert manifest.rows is not None
    data = storage.read(manifest.rows.file)
    if hashlib.sha256(data).hexdigest() != manifest.rows.sha256:
        raise ValueError(
            f"{storage.location(manifest.rows.file)} differs from its sum in the manifest; {REPAIR}"
        )
    # in this thread alone: an Arrow thread that lets go of Python's bytes while the interpreter ends aborts the process
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        return file.read(use_threads=False)


def iter_entries(storage: Storage, manifest: FeatureManifest) -> Iterator[RowEntry]:
    """Every row in corpus order. Names that repeat are one object each: a million entries take 300 MB."""
    if manifest.rows is None:
        for shard in manifest.shards:
            for index, row in enumerate(shard.rows):
                yield RowEntry(**row, shard=shard.file, row=index)
        return
    table = read_rows_table(storage, manifest)
    columns = [_shared(table.column(name)) for name in ROW_SCHEMA.names]
    values = zip(*columns, strict=True)
    for shard in manifest.shards:
        for index in range(shard.num_rows):
            sample_id, source, task, split, num_tokens, num_response_tokens = next(values)
            yield RowEntry(
                sample_id, source, task, split, num_tokens, num_response_tokens, shard.file, index
            )


def wrong_files(location: Storage | Path | str, manifest: FeatureManifest) -> list[str]:
    """What is missing or has another size than the manifest says; opens no file."""
    found = as_storage(location).sizes()
    wrong = [
        f"{shard.file} has {found[shard.file]} bytes, not {shard.num_bytes}"
        if shard.file in found
        else f"{shard.file} is missing"
        for shard in manifest.shards
        if found.get(shard.file) != shard.num_bytes
    ]
    others = [manifest.head.file] + ([manifest.rows.file] if manifest.rows else [])
    return wrong + [f"{file} is missing" for file in others if file not in found]


def _head_of(manifest: FeatureManifest) -> dict[str, Any]:
    """All of manifest.json but the rows' own entry and the sum."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": manifest.settings,
        "shards": [
            {key: value for key, value in vars(shard).items() if key != "rows"}
            for shard in manifest.shards
        ],
        "quarantined": [asdict(row) for row in manifest.quarantined],
        "head": asdict(manifest.head),
        "first_rows": manifest.first_rows,
    }


def _shared(column: pa.ChunkedArray) -> Sequence[Any]:
    """The column's values; equal strings of the few that repeat are one object."""
    values = column.to_pylist()
    if not pa.types.is_string(column.type):
        return values
    seen: dict[str, str] = {}
    return [seen.setdefault(value, value) for value in values]
