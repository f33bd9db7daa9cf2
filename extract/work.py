"""What is to be extracted and what is done already: settings, sidecars, the manifest at the end.

    features/extract.json          settings of an unfinished extraction
    features/target_head.json      sidecar of the head: its size and sum
    features/shard-000000.json     sidecar of a finished shard: its manifest entry and its quarantined rows
    features/manifest.json         written last, from all sidecars, which then go (data/feature_manifest.py)

A shard counts as done by a sidecar of the same settings and its size. It is not read again: 65 TB of sums would keep every new
worker busy for hours, files get their name only when they are whole on disk, and `verify-features` reads everything when the set
is finished. Shards are numbered by the corpus, so another number of workers continues the same work.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.files import fields_of, json_text, parse_json, sha256_file
from common.fingerprint import fingerprint, require_equal
from common.storage import Storage, open_storage
from configs.schema import Config
from data.corpus import CorpusManifest, read_corpus_manifest
from data.feature_manifest import (
    MANIFEST_FILE,
    FeatureManifest,
    HeadEntry,
    QuarantinedRow,
    ShardEntry,
    read_feature_manifest,
    write_feature_manifest,
    wrong_files,
)
from data.features import rows_of_shard
from data.settings import require_same_data
from extract.batches import ShardCut
from extract.patience import PatientStorage
from extract.selected_rows import rows_kind
from target.head import save_target_head
from target.identity import target_identity
from target.load import Target

logger = logging.getLogger(__name__)

HEAD_FILE, HEAD_RECORD, STARTED_FILE = (
    "target_head.safetensors",
    "target_head.json",
    "extract.json",
)
TAP_CONVENTION = "output of 0-based decoder layer i (HF hidden_states[i+1])"
REMEDY = "remove the features folder, or give this run another run.output_dir"
NUM_READERS = 16  # of small files: a bucket answers each after tens of milliseconds


@dataclass(frozen=True)
class ShardRecord:
    """What a sidecar says of one finished shard."""

    shard: ShardEntry
    quarantined: list[QuarantinedRow]


@dataclass(frozen=True)
class ExtractWork:
    corpus_folder: Path
    storage: Storage
    """Where the features go."""
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
    if config.extract.max_padding < 1:  # features made before these keys existed stay valid
        settings |= {"max_padding": config.extract.max_padding}
    if config.extract.soft_labels:
        settings |= {
            "soft_labels": config.extract.soft_labels,
            "soft_label_temperature": config.extract.soft_label_temperature,
        }
    if kind := rows_kind(config.train):
        settings |= {"rows": kind}
    storage = PatientStorage(open_storage(config.features_location))
    return ExtractWork(corpus_folder, storage, corpus, settings)


def shard_name(index: int) -> str:
    return f"shard-{index:06d}.parquet"


def record_name(index: int) -> str:
    return f"shard-{index:06d}.json"


def is_complete(work: ExtractWork) -> bool:
    """Whether the manifest and every file it lists are there. Raises ValueError if other settings made it."""
    if not work.storage.exists(MANIFEST_FILE):
        return False
    manifest = read_feature_manifest(work.storage, with_rows=False)
    wanted = work.settings
    if "max_padding" not in manifest.settings:  # finished before batches were held to a padding
        wanted = {key: value for key, value in wanted.items() if key != "max_padding"}
    if manifest.settings.get("rows") == "held-out":  # some rows are no complete set of all
        wanted = {"rows": None} | wanted
    require_equal(f"the manifest in {work.storage.url}", manifest.settings, wanted, REMEDY)
    return not wrong_files(work.storage, manifest)


def require_same_start(work: ExtractWork) -> None:
    """Raises ValueError if the folder holds an extraction begun with other settings."""
    try:
        data = work.storage.read(STARTED_FILE)
    except FileNotFoundError:
        return
    path = work.storage.location(STARTED_FILE)
    found = parse_json(data, path, REMEDY)
    with fields_of(path, REMEDY):
        require_equal(
            f"the extraction begun in {work.storage.url}",
            found,
            dict.fromkeys(found) | work.settings,  # a recipe that leaves a setting out is another
            REMEDY,
        )


def open_work(work: ExtractWork) -> None:
    """One worker at a time, before its first shard and once its target is known to fit: a slip in the recipe must not leave
    a folder that refuses its correction. Turns a manifest with missing files into sidecars again."""
    work.storage.remove_leftovers()
    manifest = None
    if work.storage.exists(MANIFEST_FILE) and not is_complete(work):
        manifest = read_feature_manifest(work.storage, with_rows=False)
        require_equal(
            f"the manifest in {work.storage.url}",
            manifest.settings,
            dict.fromkeys(manifest.settings) | work.settings,
            "what is missing is made again by the recipe that made the rest (max_padding=None: extract.max_padding=1)",
        )
    if not work.storage.create(STARTED_FILE, json_text(work.settings).encode()):
        require_same_start(work)
    if manifest is not None:
        _reopen(work, manifest)


def _reopen(work: ExtractWork, manifest: FeatureManifest) -> None:
    """Sidecars of the files that are there, in place of the manifest."""
    wrong = wrong_files(work.storage, manifest)
    logger.warning("making again what is missing: %s", ", ".join(wrong))
    found = work.storage.sizes()
    for entry in _with_rows(work.storage, manifest):
        if found.get(entry.file) == entry.num_bytes:
            rows = [row for row in manifest.quarantined if row.shard == entry.file]
            write_record(work, ShardRecord(entry, rows))
    work.storage.delete(MANIFEST_FILE)


def _with_rows(storage: Storage, manifest: FeatureManifest) -> list[ShardEntry]:
    """The manifest's shards with their rows, by rows.parquet; if that is missing or damaged, those that say it themselves."""
    try:
        return read_feature_manifest(storage).shards
    except (ValueError, OSError) as error:
        logger.warning("%s; the shards say what is in them", error)
    whole = []
    for shard in manifest.shards:
        try:
            whole.append(replace(shard, rows=rows_of_shard(storage, shard)))
        except (ValueError, OSError) as error:
            logger.warning("%s is made again: %s", storage.location(shard.file), error)
    return whole


def save_head(work: ExtractWork, target: Target) -> None:
    """The target's embedding and head, unless they are there."""
    if _recorded_head(work) is not None:
        return
    with work.storage.aside(HEAD_FILE) as path:
        save_target_head(path, target)
        value = {"num_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        work.storage.put(HEAD_FILE, path)
    work.storage.write(HEAD_RECORD, json_text(value).encode())


def write_record(work: ExtractWork, record: ShardRecord) -> None:
    name = record.shard.file.replace(".parquet", ".json")
    value = {"settings": work.fingerprint, **asdict(record)}
    work.storage.write(name, json_text(value).encode())


def read_record(work: ExtractWork, index: int) -> ShardRecord | None:
    """The sidecar of shard `index`; None if there is none, or one of other settings."""
    path = work.storage.location(record_name(index))
    try:
        value = parse_json(work.storage.read(record_name(index)), path, "remove it")
    except FileNotFoundError:
        return None
    with fields_of(path, "remove it"):  # never half: it was put whole
        if value["settings"] != work.fingerprint:
            return None
        return ShardRecord(
            ShardEntry(**value["shard"]), [QuarantinedRow(**row) for row in value["quarantined"]]
        )


def read_records(work: ExtractWork, indices: Sequence[int]) -> list[ShardRecord | None]:
    """Sidecars of these shards, many at once."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(lambda index: read_record(work, index), indices))


def finish_work(
    work: ExtractWork,
    cuts: Sequence[ShardCut],
    max_quarantined: float,
    first_rows: dict[str, Any] | None = None,
) -> FeatureManifest | None:
    """One worker, when all sidecars are there: write the manifest, then drop them. Any worker would write the same.

    None if a sidecar or its shard was not what it should be: it is to be made again.
    """
    records = read_records(work, [cut.index for cut in cuts])
    sizes = work.storage.sizes()
    whole = [
        record
        for index, record in enumerate(records)
        if record and sizes.get(shard_name(index)) == record.shard.num_bytes
    ]
    head = _recorded_head(work)
    if len(whole) < len(cuts) or head is None:
        _forget(work, {record.shard.file for record in whole}, len(cuts))
        return None
    quarantined = [row for record in whole for row in record.quarantined]
    num_rows = sum(cut.num_rows for cut in cuts)
    num_stored = sum(record.shard.num_rows for record in whole)
    assert num_stored + len(quarantined) == num_rows, "rows were lost"
    require_few(quarantined, num_rows, max_quarantined)
    manifest = write_feature_manifest(
        work.storage,
        FeatureManifest(
            settings=work.settings,
            shards=[record.shard for record in whole],
            quarantined=quarantined,
            head=head,
            first_rows=first_rows,
        ),
    )
    clear_sidecars(work)
    return manifest


def clear_sidecars(work: ExtractWork) -> None:
    """Only once a manifest stands: it says the same."""
    names = [name for name in work.storage.names("shard-") if name.endswith(".json")]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(work.storage.delete, [*names, HEAD_RECORD, STARTED_FILE]))
    work.storage.remove_leftovers()


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


def _recorded_head(work: ExtractWork) -> HeadEntry | None:
    """None if the head is not there as its sidecar says."""
    try:
        value = json.loads(work.storage.read(HEAD_RECORD))
        if work.storage.size(HEAD_FILE) != value["num_bytes"]:
            return None
    except FileNotFoundError:
        return None
    return HeadEntry(HEAD_FILE, value["sha256"])


def _forget(work: ExtractWork, whole: set[str], num_shards: int) -> None:
    for index in range(num_shards):
        if shard_name(index) not in whole:
            logger.warning("%s is made again", work.storage.location(shard_name(index)))
            work.storage.delete(record_name(index))
