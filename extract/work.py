"""What is to be extracted and what is done already: settings, sidecars, the manifest at the end.

    features/extract.json          settings of an unfinished extraction
    features/shard-000000.json     sidecar of a finished shard: its manifest entry and its quarantined rows
    features/manifest.json         written last, from all sidecars, which then go

A shard counts as done only by a sidecar of the same settings, its size and its sha256, never because the file exists. Shards
are numbered by the corpus, so another number of ranks continues the same work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import fields_of, read_json, sha256_file, write_json
from common.fingerprint import fingerprint, require_equal
from configs.schema import Config
from data.corpus import CorpusManifest, read_corpus_manifest
from data.feature_manifest import (
    FeatureManifest,
    HeadEntry,
    QuarantinedRow,
    ShardEntry,
    manifest_path,
    read_feature_manifest,
    write_feature_manifest,
    wrong_files,
)
from data.settings import require_same_data
from target.identity import target_identity

logger = logging.getLogger(__name__)

HEAD_FILE = "target_head.safetensors"
TAP_CONVENTION = "output of 0-based decoder layer i (HF hidden_states[i+1])"
REMEDY = "remove the features folder, or give this run another run.output_dir"


@dataclass(frozen=True)
class ShardRecord:
    """What a sidecar says of one finished shard."""

    shard: ShardEntry
    quarantined: list[QuarantinedRow]


@dataclass(frozen=True)
class ExtractWork:
    corpus_folder: Path
    folder: Path
    corpus: CorpusManifest
    settings: dict[str, Any]
    """Everything that decides a byte of the features; training and evaluation read it from the manifest."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.settings)


def plan_work(config: Config) -> ExtractWork:
    """The work of this recipe. Raises if the corpus is missing, or of another target, tokenizer or template."""
    corpus_folder = config.run.folder / "corpus"
    corpus = read_corpus_manifest(corpus_folder)
    require_equal(
        f"the corpus in {corpus_folder}",
        corpus.settings,
        target_identity(config.target),
        "answer the prompts with this target (remove the corpus, run data), or set the recipe's target back",
    )
    require_same_data(f"the corpus in {corpus_folder}", corpus.settings, config.data)
    if corpus.num_rows == 0:
        raise ValueError(f"the corpus in {corpus_folder} has no rows; run data with more sources")
    settings = corpus.settings | {
        "corpus": corpus.fingerprint,
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "tap_convention": TAP_CONVENTION,
        "hidden_size": config.target.hidden_size,
        "num_layers": config.target.num_layers,
        "vocab_size": config.target.vocab_size,
        "target_dtype": config.target.dtype,
        "attention": config.target.attention,
        "codec": config.extract.codec,
        "shard_bytes": config.extract.shard_bytes,
        "batch_tokens": config.extract.batch_tokens,
        "cpu_threads": config.run.cpu_threads,
    }
    if config.extract.soft_labels:  # features made before these keys existed stay valid
        settings |= {
            "soft_labels": config.extract.soft_labels,
            "soft_label_temperature": config.extract.soft_label_temperature,
        }
    return ExtractWork(corpus_folder, config.run.folder / "features", corpus, settings)


def is_greedy(corpus: CorpusManifest) -> bool:
    """Whether the target itself answered, taking its argmax at every token."""
    recipe = corpus.settings["recipe"]
    return recipe["data.responses.generate"] and recipe["data.responses.temperature"] == 0


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.parquet"


def is_complete(work: ExtractWork) -> bool:
    """Whether the manifest and every file it lists are there. Raises ValueError if other settings made it."""
    if not manifest_path(work.folder).is_file():
        return False
    manifest = read_feature_manifest(work.folder, with_rows=False)
    require_equal(f"the manifest in {work.folder}", manifest.settings, work.settings, REMEDY)
    return not wrong_files(work.folder, manifest)


def require_same_start(work: ExtractWork) -> None:
    """Raises ValueError if the folder holds an extraction begun with other settings."""
    started = _started_path(work.folder)
    if started.is_file():
        found = read_json(started, REMEDY)
        with fields_of(started, REMEDY):
            require_equal(f"the extraction begun in {work.folder}", found, work.settings, REMEDY)


def open_work(work: ExtractWork) -> None:
    """Main rank, before any shard and once the target is known to fit: a slip in the recipe must not leave a folder that
    refuses its correction. Turns a manifest with missing files into sidecars again."""
    write_json(_started_path(work.folder), work.settings)
    if not manifest_path(work.folder).is_file():
        return
    manifest = read_feature_manifest(work.folder)
    logger.warning(
        "making again what is missing: %s", ", ".join(wrong_files(work.folder, manifest))
    )
    for entry in manifest.shards:
        rows = [row for row in manifest.quarantined if row.shard == entry.file]
        write_record(work, ShardRecord(entry, rows))
    manifest_path(work.folder).unlink()


def write_record(work: ExtractWork, record: ShardRecord) -> None:
    write_json(
        _sidecar(work.folder, record.shard.file), {"settings": work.fingerprint, **asdict(record)}
    )


def read_records(work: ExtractWork) -> dict[str, ShardRecord]:
    """Sidecars of these settings whose shard has the size they say, by shard name."""
    records: dict[str, ShardRecord] = {}
    for path in sorted(work.folder.glob("shard-*.json")):
        record = _read_record(work, path)
        shard = path.with_suffix(".parquet")
        if record and shard.is_file() and shard.stat().st_size == record.shard.num_bytes:
            records[shard.name] = record
    return records


def is_intact(work: ExtractWork, record: ShardRecord) -> bool:
    return sha256_file(work.folder / record.shard.file) == record.shard.sha256


def finish_work(work: ExtractWork, num_shards: int, max_quarantined: float) -> FeatureManifest:
    """Main rank, when all shards are there: write the manifest, then drop the sidecars."""
    found = read_records(work)
    records = [found[shard_name(index)] for index in range(num_shards)]
    quarantined = [row for record in records for row in record.quarantined]
    num_rows = sum(record.shard.num_rows for record in records)
    assert num_rows + len(quarantined) == work.corpus.num_rows, "rows were lost"
    require_few(quarantined, work.corpus.num_rows, max_quarantined)
    manifest = write_feature_manifest(
        work.folder,
        FeatureManifest(
            settings=work.settings,
            shards=[record.shard for record in records],
            quarantined=quarantined,
            head=HeadEntry(HEAD_FILE, sha256_file(work.folder / HEAD_FILE)),
        ),
    )
    clear_sidecars(work.folder)
    return manifest


def clear_sidecars(folder: Path) -> None:
    """Only once a manifest stands: it says the same."""
    for path in [*folder.glob("shard-*.json"), _started_path(folder)]:
        path.unlink(missing_ok=True)


def require_few(
    quarantined: Iterable[QuarantinedRow], num_rows: int, max_quarantined: float
) -> None:
    """Raises ValueError if more than `max_quarantined` of the corpus' rows failed their checks."""
    rows = list(quarantined)
    if len(rows) > max_quarantined * num_rows:
        first = rows[0]
        raise ValueError(
            f"{len(rows)} of {num_rows} rows failed their checks, more than extract.max_quarantined={max_quarantined}; "
            f"the first: sample {first.sample_id} of {first.shard}: {first.reason}"
        )


def _read_record(work: ExtractWork, path: Path) -> ShardRecord | None:
    value = read_json(path, "remove it")  # sidecars are written atomically: never half
    with fields_of(path, "remove it"):
        if value["settings"] != work.fingerprint:
            return None
        return ShardRecord(
            ShardEntry(**value["shard"]), [QuarantinedRow(**row) for row in value["quarantined"]]
        )


def _sidecar(folder: Path, shard: str) -> Path:
    return (folder / shard).with_suffix(".json")


def _started_path(folder: Path) -> Path:
    return folder / "extract.json"
