"""Is a features folder what its manifest says? Every byte is read; what differs is named by file and row.

Of a shard: its sum, its schema, its rows' page checksums, ids, lengths and splits. Of the rest: sums, spelling and counts. A shard
whose sum is wrong is searched for the rows that cannot be read. If all can, the damage lies between them (Parquet's page headers and
footer hold no checksum): then the shard is made again from its own rows, and the first byte that differs says where.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import fields_of, sha256_file
from common.progress import Progress
from common.storage import Storage
from data.feature_manifest import (
    MANIFEST_FILE,
    QUARANTINE_FILE,
    REMEDY,
    ROW_SCHEMA,
    ROWS_FILE,
    FeatureManifest,
    RowEntry,
    ShardEntry,
    iter_entries,
    manifest_file,
    manifest_from_rows,
    parse_manifest,
    quarantine_file,
    read_rows_table,
    rows_file,
)
from data.feature_shards import (
    FeatureLayout,
    StoredRow,
    check_schema,
    open_shard,
    read_stored_row,
    write_shard,
)
from data.features import layout_of

logger = logging.getLogger(__name__)

FOOTER = "footer"
Entries = dict[str, list[RowEntry]]


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it should be."""

    file: str
    where: str
    """`row 3 (sample ...)`, `footer`, or what else of the file."""
    why: str
    can_mend_itself: bool = False
    """What is left of the file is enough to make it again: no target is needed."""

    def __str__(self) -> str:
        where = f", {self.where}" if self.where else ""
        return f"{self.file}{where}: {self.why}"


@dataclass(frozen=True)
class Verified:
    manifest: FeatureManifest
    entries: Entries
    """By shard; of no shard if rows.parquet is damaged."""
    num_bytes: int
    damages: list[Damage] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Those with a damage, once each, in the order they are to be mended in."""
        return list(dict.fromkeys(damage.file for damage in self.damages))


def verify_files(storage: Storage, num_threads: int = 4) -> Verified:
    """Reads every byte. Raises FileNotFoundError or ValueError if neither manifest.json nor rows.parquet says what there should be."""
    manifest, damages = read_manifest(storage)
    entries, found = _read_entries(storage, manifest)
    damages += found
    with fields_of(storage.location(MANIFEST_FILE), REMEDY):
        layout = layout_of(manifest)
    sizes = storage.sizes()
    total = sum(shard.num_bytes for shard in manifest.shards)
    progress = Progress("verify features", total, "bytes")
    by_sum = {shard.sha256: shard.file for shard in manifest.shards}

    def check(shard: ShardEntry) -> list[Damage]:
        if shard.file not in sizes:
            return [Damage(shard.file, "", "is missing")]
        with storage.local_copy(shard.file) as path:
            return check_shard(path, shard, entries.get(shard.file), layout, by_sum)

    with ThreadPoolExecutor(num_threads) as pool:
        for shard, wrong in zip(manifest.shards, pool.map(check, manifest.shards), strict=True):
            damages += wrong
            progress.advance(shard.num_bytes)
    damages += _check_rest(storage, manifest, sizes)
    progress.finish()
    return Verified(manifest, entries, sum(sizes.values()), damages)


def read_manifest(storage: Storage) -> tuple[FeatureManifest, list[Damage]]:
    """manifest.json; if it is damaged, what rows.parquet holds of it. Raises as `verify_files`."""
    path = storage.location(MANIFEST_FILE)
    try:
        data = storage.read(MANIFEST_FILE)
        manifest = parse_manifest(data, path)
    except (ValueError, FileNotFoundError) as error:
        if not storage.exists(ROWS_FILE):
            raise type(error)(
                f"{path} cannot be used and there is no {ROWS_FILE}: {error}; {REMEDY}"
            ) from error
        manifest = manifest_from_rows(storage.read(ROWS_FILE), storage.location(ROWS_FILE))
        _require_whole_rows(storage, manifest)
        return manifest, [Damage(MANIFEST_FILE, "", str(error), can_mend_itself=True)]
    if manifest.rows is not None and manifest_file(manifest) != data:
        return manifest, [Damage(MANIFEST_FILE, "", "is spelled differently", can_mend_itself=True)]
    return manifest, []


def _require_whole_rows(storage: Storage, manifest: FeatureManifest) -> None:
    """Raises ValueError if rows.parquet, which alone is to say what there should be, is not as it was written."""
    path = storage.location(ROWS_FILE)
    problem = f"{path} is damaged, and {MANIFEST_FILE} too; {REMEDY}"
    try:
        table, start, shards = read_rows_table(storage, manifest), 0, []
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(problem) from error
    if not table.schema.equals(ROW_SCHEMA) or table.num_rows != manifest.num_rows:
        raise ValueError(problem)
    for shard in manifest.shards:
        shards.append(replace(shard, rows=table.slice(start, shard.num_rows).to_pylist()))
        start += shard.num_rows
    if rows_file(replace(manifest, shards=shards)) != storage.read(ROWS_FILE):
        raise ValueError(problem)


def _read_entries(storage: Storage, manifest: FeatureManifest) -> tuple[Entries, list[Damage]]:
    """Every row's entry by shard; shards without rows have none."""
    entries: Entries = {shard.file: [] for shard in manifest.shards}
    try:
        for entry in iter_entries(storage, manifest):
            entries[entry.shard].append(entry)
    except (ValueError, OSError, pa.ArrowException) as error:
        return {}, [Damage(ROWS_FILE, "", str(error), can_mend_itself=True)]
    return entries, []


def _check_rest(storage: Storage, manifest: FeatureManifest, sizes: dict[str, int]) -> list[Damage]:
    """Head, quarantine list, and shards that nobody asked for."""
    damages, head = [], manifest.head
    if head.file not in sizes:
        damages.append(Damage(head.file, "", "is missing"))
    else:
        with storage.local_copy(head.file) as path:
            if sha256_file(path) != head.sha256:
                damages.append(Damage(head.file, "", "differs from its sum in the manifest"))
    if manifest.rows is not None:
        wanted = quarantine_file(manifest)
        found = storage.read(QUARANTINE_FILE) if QUARANTINE_FILE in sizes else b""
        if found != wanted:
            why = "does not list the manifest's quarantined rows"
            damages.append(Damage(QUARANTINE_FILE, "", why, can_mend_itself=True))
    known = {shard.file for shard in manifest.shards}
    for name in sorted(sizes):
        if name.startswith("shard-") and name.endswith(".parquet") and name not in known:
            logger.warning("%s is in no manifest; delete it", storage.location(name))
    return damages


def check_shard(
    path: Path,
    shard: ShardEntry,
    entries: Sequence[RowEntry] | None,
    layout: FeatureLayout,
    by_sum: dict[str, str],
) -> list[Damage]:
    """What is wrong with a shard's file. by_sum: names of the set's shards by sha256, to recognise one under another's name."""
    sum_found = sha256_file(path)
    if sum_found in by_sum and by_sum[sum_found] != shard.file:
        return [Damage(shard.file, "", f"holds the bytes of {by_sum[sum_found]}")]
    is_intact = sum_found == shard.sha256
    try:
        with open_shard(path) as file:
            rows, damages = read_rows(file, shard, entries, layout, keep=not is_intact)
    except (pa.ArrowException, OSError, ValueError) as error:
        size = path.stat().st_size
        cut = f" ({size} bytes, not {shard.num_bytes})" if size != shard.num_bytes else ""
        return [Damage(shard.file, FOOTER, f"{_line(error)}{cut}")]
    if damages or is_intact:
        return damages
    return [_between_rows(path, shard, rows, layout)]


def read_rows(
    file: pq.ParquetFile,
    shard: ShardEntry,
    entries: Sequence[RowEntry] | None,
    layout: FeatureLayout,
    keep: bool,
) -> tuple[list[StoredRow], list[Damage]]:
    """Every row with its checksums; the good ones if they are to be kept, and what is wrong with the others.

    Raises ValueError, pyarrow.ArrowException or OSError if the file as a whole is not of this layout.
    """
    check_schema(file, layout)
    if file.num_row_groups != shard.num_rows:
        raise ValueError(f"it has {file.num_row_groups} rows, not {shard.num_rows}")
    rows: list[StoredRow] = []
    damages: list[Damage] = []
    num_tokens = 0
    for index in range(shard.num_rows):
        entry = entries[index] if entries else None
        where = f"row {index}" + (f" (sample {entry.sample_id})" if entry else "")
        try:
            row = read_stored_row(file, index, layout)
        except (pa.ArrowException, OSError, ValueError) as error:
            damages.append(Damage(shard.file, where, _line(error)))
            continue
        if entry and (problem := _differs(row, entry)):
            damages.append(Damage(shard.file, where, problem))
        num_tokens += len(row.input_ids)
        if keep:
            rows.append(row)
    if not damages and num_tokens != shard.num_tokens:
        raise ValueError(f"it has {num_tokens} tokens, not {shard.num_tokens}")
    return rows, damages


def _differs(row: StoredRow, entry: RowEntry) -> str | None:
    found = (row.sample_id, row.source, row.task, row.split)
    if found != (entry.sample_id, entry.source, entry.task, entry.split):
        return f"holds sample {row.sample_id} of {row.source}, {row.task}, {row.split}"
    lengths = len(row.input_ids), int(row.loss_mask.sum())
    if lengths != (entry.num_tokens, entry.num_response_tokens):
        return f"has {lengths[0]} tokens, {lengths[1]} of the response"
    return None


def _between_rows(
    path: Path, shard: ShardEntry, rows: Sequence[StoredRow], layout: FeatureLayout
) -> Damage:
    """All rows are good and the sum is wrong: where, and whether the rows give the shard back."""
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "again.parquet"
        write_shard(again, rows, layout)
        if sha256_file(again) != shard.sha256:
            return Damage(
                shard.file, "", "differs from its sum in the manifest, though every row can be read"
            )
        offset = first_difference(path, again)
        return Damage(
            shard.file, _place(again, offset), f"byte {offset} differs", can_mend_itself=True
        )


def first_difference(path: Path, other: Path) -> int:
    """Offset of the first byte in which two files differ; the length of the shorter one if there is none before."""
    with path.open("rb") as left, other.open("rb") as right:
        offset = 0
        while True:
            a, b = left.read(2**20), right.read(2**20)
            if a != b or not a:
                same = next(
                    (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                    min(len(a), len(b)),
                )
                return offset + same
            offset += len(a)


def _place(path: Path, offset: int) -> str:
    """The row whose pages span `offset`, else the footer."""
    if offset < 4:
        return "magic at the start"
    metadata = pq.read_metadata(path)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        columns = [group.column(number) for number in range(group.num_columns)]
        start = min(column.data_page_offset for column in columns)
        size = sum(column.total_compressed_size for column in columns)
        if start <= offset < start + size:
            return f"row {index}, page header"
    return FOOTER


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
