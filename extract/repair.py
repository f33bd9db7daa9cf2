"""Make damaged files of a features folder again, with equal bytes: nothing takes a file's place unless its sum is the manifest's.

What can mend itself does: a manifest from rows.parquet and the other way round, a shard from its own rows when they are all whole.
Other shards are extracted again whole, in their own batches: one is at most extract.shard_bytes, seconds of a GPU, and a batch
of a row is most of it. The same machine and software give the same bits; others may not, and then nothing is replaced.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from common.files import sha256_file
from common.fingerprint import require_equal
from common.storage import Storage
from configs.schema import Config
from data.corpus_rows import CorpusRows
from data.feature_manifest import (
    MANIFEST_FILE,
    QUARANTINE_FILE,
    ROWS_FILE,
    FeatureManifest,
    ShardEntry,
    manifest_file,
    quarantine_file,
    rows_file,
)
from data.feature_shards import (
    FeatureLayout,
    FeatureRow,
    StoredRow,
    open_shard,
    read_stored_row,
    write_shard,
)
from data.features import layout_of, rows_of_shard
from extract.batches import CorpusSlice
from extract.checks import FIRST_ROWS, measure_first_rows
from extract.selected_rows import stored_rows
from extract.slices import Extracted, extract_slice
from extract.verify import Verified
from extract.work import plan_work
from target.head import save_target_head
from target.load import load_target

logger = logging.getLogger(__name__)

OTHER_BYTES = (
    "came out with other bytes: this machine, its software or the recipe is not what made it; to take the new ones, delete the file and "
    "run extract"
)


def repair(
    storage: Storage, verified: Verified, config: Config | None, device: torch.device
) -> list[str]:
    """Mends every damaged file; gives their names. Raises ValueError naming the first that could not be made again.

    config: the recipe, needed for what only the target can give. Shards come before rows.parquet, which is made from them.
    """
    damaged = verified.files
    manifest = verified.manifest
    layout = layout_of(manifest)
    hard = {damage.file for damage in verified.damages if not damage.can_mend_itself}
    shards = [shard for shard in manifest.shards if shard.file in damaged]
    for shard in shards:
        if shard.file not in hard:
            _rewrite(storage, shard, layout)
    if hard:
        if config is None:
            names = ", ".join(sorted(hard)[:5])
            raise ValueError(f"only the target can make {names} again: give --config RECIPE")
        _Extractor(storage, manifest, config, device).make(shards, hard)
    if MANIFEST_FILE in damaged:
        storage.write(MANIFEST_FILE, manifest_file(manifest))
    if ROWS_FILE in damaged:
        _write_rows(storage, manifest)
    if QUARANTINE_FILE in damaged:
        if manifest.quarantined:
            storage.write(QUARANTINE_FILE, quarantine_file(manifest))
        else:
            storage.delete(QUARANTINE_FILE)
    return damaged


def _rewrite(storage: Storage, shard: ShardEntry, layout: FeatureLayout) -> None:
    """A shard whose rows are whole, from them."""
    with storage.local_copy(shard.file) as path, open_shard(path) as file:
        rows = [read_stored_row(file, index, layout) for index in range(shard.num_rows)]
        _put(storage, shard, rows, layout)


def _put(
    storage: Storage,
    shard: ShardEntry,
    rows: Sequence[FeatureRow | StoredRow],
    layout: FeatureLayout,
) -> None:
    with storage.aside(shard.file) as aside:
        write_shard(aside, rows, layout)
        _require_sum(storage.location(shard.file), aside, shard.sha256)
        storage.put(shard.file, aside)
    logger.info("%s is whole again", storage.location(shard.file))


def _require_sum(name: str, path: Path, sha256: str) -> None:
    if sha256_file(path) != sha256:
        raise ValueError(f"{name} {OTHER_BYTES}")


class _Extractor:
    """The target, for what cannot mend itself."""

    def __init__(
        self, storage: Storage, manifest: FeatureManifest, config: Config, device: torch.device
    ):
        if "max_padding" not in manifest.settings:  # made before batches were held to one
            unpadded = config.extract.model_copy(update={"max_padding": 1.0})
            config = config.model_copy(update={"extract": unpadded})
        self.storage, self.manifest, self.config = storage, manifest, config
        self.work = plan_work(config)
        require_equal(
            "the features",
            manifest.settings,
            dict.fromkeys(manifest.settings) | self.work.settings,
            "give the recipe that made them",
        )
        self.target = load_target(config.target, device)

    def make(self, shards: Sequence[ShardEntry], wanted: set[str]) -> None:
        head = self.manifest.head
        if head.file in wanted:
            with self.storage.aside(head.file) as aside:
                save_target_head(aside, self.target)
                _require_sum(self.storage.location(head.file), aside, head.sha256)
                self.storage.put(head.file, aside)
        todo = [shard for shard in shards if shard.file in wanted]
        if not todo:
            return
        work, tap_rms = self.work, self._tap_rms()
        corpus = stored_rows(work.corpus_folder, work.corpus, work.settings.get("rows")).rows
        layout = layout_of(self.manifest)
        for index, start, stop, shard in self._places():
            if shard in todo:
                logger.info("extracting %s again", shard.file)
                part = CorpusSlice(index, corpus.read(start, stop))
                extracted = extract_slice(self.config, self.target, part, tap_rms)
                self._require_same_quarantine(shard, extracted)
                _put(self.storage, shard, extracted.rows, layout)

    def _places(self) -> Iterator[tuple[int, int, int, ShardEntry]]:
        """Number, first row and end of every shard in the corpus: what it holds and what was quarantined from it."""
        quarantined = Counter(row.shard for row in self.manifest.quarantined)
        start = 0
        for index, shard in enumerate(self.manifest.shards):
            stop = start + shard.num_rows + quarantined[shard.file]
            yield index, start, stop, shard
            start = stop

    def _tap_rms(self) -> Tensor:
        """(D,), as extraction learned it."""
        corpus = CorpusRows(self.work.corpus_folder, self.work.corpus)
        rows = corpus.read(0, min(FIRST_ROWS, len(corpus.lengths)))
        taps, batch_tokens = self.config.drafter.target_layer_ids, self.config.extract.batch_tokens
        return measure_first_rows(self.target, rows, taps, batch_tokens).tap_rms

    def _require_same_quarantine(self, shard: ShardEntry, extracted: Extracted) -> None:
        wanted = [row.sample_id for row in self.manifest.quarantined if row.shard == shard.file]
        if [row.sample_id for row in extracted.quarantined] != wanted:
            raise ValueError(
                f"{self.storage.location(shard.file)}: {len(extracted.quarantined)} rows fail their checks now, {len(wanted)} when it "
                "was made; it stays as it is"
            )


def _write_rows(storage: Storage, manifest: FeatureManifest) -> None:
    """rows.parquet, from the shards' own columns."""
    assert manifest.rows is not None
    shards = [replace(shard, rows=rows_of_shard(storage, shard)) for shard in manifest.shards]
    data = rows_file(replace(manifest, shards=shards))
    if hashlib.sha256(data).hexdigest() != manifest.rows.sha256:
        raise ValueError(f"{storage.location(ROWS_FILE)} {OTHER_BYTES}")
    storage.write(ROWS_FILE, data)
