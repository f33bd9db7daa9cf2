"""Corpus shards: one Parquet row a sample, whole conversations with the token ids that the target produced.

    corpus/shard-00000.parquet ...      rows in corpus order, `rows_per_shard` each
    corpus/manifest.json                the only truth: settings, shards with sums, counts of what became of the input

The manifest is written last, so a folder without one is an unfinished corpus. Nothing in either depends on time, host
or the number of ranks: equal settings give equal bytes.

Shapes: S tokens of a sample, prompt and response.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.files import atomic_path, fields_of, read_json, sha256_file, write_json
from common.fingerprint import fingerprint

Split = Literal["train", "validation", "test"]

FORMAT, VERSION = "dflash-corpus", 1
REMEDY = "remove the corpus folder and run the data stage again"
ROWS_PER_GROUP = 512  # what a reader holds at once

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("task", pa.string()),
        ("split", pa.string()),
        ("messages", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("num_tokens", pa.int32()),
        ("num_response_tokens", pa.int32()),
        ("finished", pa.bool_()),
        ("thinking", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class CorpusRow:
    sample_id: str
    """Content hash of source and prompt messages: the same in every run."""
    source: str
    task: str
    split: Split
    messages: str
    """JSON list of {role, content, ...}: the conversation to the last response, as text. The ids are the truth, not this."""
    input_ids: np.ndarray
    """(S,) int32, prompts and responses as the target saw and made them."""
    loss_mask: np.ndarray
    """(S,) bool, true on the tokens that the target generated, thinking included: a run for every turn."""
    finished: bool
    """The last response ends with an EOS token; false: it was cut at a limit."""
    thinking: bool | None = None
    """The chat template's `enable_thinking` of this row, where it was not the run's."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_response_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class ShardEntry:
    file: str
    num_rows: int
    num_tokens: int
    num_response_tokens: int
    sha256: str


@dataclass(frozen=True)
class CorpusManifest:
    settings: dict[str, Any]
    """Target identity and `data` (a fingerprint of the recipe's data section, seed and sources); later stages carry it on."""
    shards: list[ShardEntry]
    counts: dict[str, Any]
    mix: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """By source: category, rows, tokens, rows by licence; empty for corpora made before it existed."""

    @property
    def fingerprint(self) -> str:
        """Equal for corpora of equal settings and bytes."""
        return fingerprint([self.settings, [dataclasses.asdict(shard) for shard in self.shards]])

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_response_tokens(self) -> int:
        return sum(shard.num_response_tokens for shard in self.shards)


def manifest_path(folder: Path) -> Path:
    return folder / "manifest.json"


def write_corpus(
    folder: Path,
    rows: Iterable[CorpusRow],
    settings: Mapping[str, Any],
    counts: Mapping[str, Any],
    rows_per_shard: int,
    mix: Mapping[str, dict[str, Any]] | None = None,
) -> CorpusManifest:
    """Write shards of `rows_per_shard` rows, then the manifest. One writer; a repeat after a kill gives the same bytes.

    `counts` and `mix` are looked at after the last row, so a generator of rows may fill them on its way.
    """
    stream = iter(rows)
    shards: list[ShardEntry] = []
    while batch := list(itertools.islice(stream, rows_per_shard)):
        shards.append(_write_shard(folder / f"shard-{len(shards):05d}.parquet", batch))
    manifest = CorpusManifest(dict(settings), shards, dict(counts), dict(mix or {}))
    write_json(
        manifest_path(folder),
        {
            "format": FORMAT,
            "version": VERSION,
            "settings": manifest.settings,
            "shards": [dataclasses.asdict(shard) for shard in shards],
            "counts": manifest.counts,
            "mix": manifest.mix,
        },
    )
    return manifest


def read_corpus_manifest(folder: Path) -> CorpusManifest:
    """Raises FileNotFoundError when the corpus is not there or unfinished, ValueError when it is not a corpus."""
    path = manifest_path(folder)
    found = read_json(path, "run the data stage first, to its end")
    if (
        not isinstance(found, dict)
        or found.get("format") != FORMAT
        or found.get("version") != VERSION
    ):
        raise ValueError(f"{path} is not a {FORMAT} version {VERSION} manifest; {REMEDY}")
    with fields_of(path, REMEDY):
        shards = [ShardEntry(**shard) for shard in found["shards"]]
        mix = dict(found["mix"]) if "mix" in found else {}
        return CorpusManifest(dict(found["settings"]), shards, dict(found["counts"]), mix)


def iter_corpus(folder: Path, manifest: CorpusManifest) -> Iterator[CorpusRow]:
    """Every row in corpus order, a row group in memory at a time.

    Each shard is compared with its sum before its first row is given: ValueError or FileNotFoundError names the shard.
    """
    for shard in manifest.shards:
        path = folder / shard.file
        require_sum(path, shard)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                yield from rows_of(batch)


def require_sum(path: Path, shard: ShardEntry) -> None:
    """Raises ValueError or FileNotFoundError, naming the file, if it is not what the manifest says of `shard`."""
    if not path.is_file():
        raise FileNotFoundError(f"corpus shard {path} is missing; {REMEDY}")
    if sha256_file(path) != shard.sha256:
        raise ValueError(f"corpus shard {path} differs from its sum in the manifest; {REMEDY}")


def _write_shard(path: Path, rows: list[CorpusRow]) -> ShardEntry:
    with atomic_path(path) as aside:
        pq.write_table(
            pa.Table.from_pylist([_record(row) for row in rows], SCHEMA),
            aside,
            row_group_size=ROWS_PER_GROUP,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
        )
        return ShardEntry(
            file=path.name,
            num_rows=len(rows),
            num_tokens=sum(row.num_tokens for row in rows),
            num_response_tokens=sum(row.num_response_tokens for row in rows),
            sha256=sha256_file(aside),
        )


def _record(row: CorpusRow) -> dict[str, Any]:
    assert row.input_ids.shape == row.loss_mask.shape == (row.num_tokens,)
    counts = {"num_tokens": row.num_tokens, "num_response_tokens": row.num_response_tokens}
    return vars(row) | counts


def rows_of(batch: pa.RecordBatch) -> Iterator[CorpusRow]:
    """Rows of a part of a corpus shard, all columns."""
    # corpora made before a column existed have its default
    names = [f.name for f in dataclasses.fields(CorpusRow) if f.name in batch.schema.names]
    plain = batch.select([name for name in names if name not in ("input_ids", "loss_mask")])
    ids, masks = batch.column("input_ids"), batch.column("loss_mask")
    for index, values in enumerate(plain.to_pylist()):
        yield CorpusRow(
            input_ids=ids[index].values.to_numpy(),
            loss_mask=masks[index].values.to_numpy(zero_copy_only=False),
            **values,
        )
