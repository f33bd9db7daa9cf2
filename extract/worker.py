"""One worker: claims shards and makes them, forward | copy to host | encode, compress, store, each beside the others.

Raw features of at most `extract.writers` + 2 shards are in memory: one growing, one waiting, one in each writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.files import sha256_file
from configs.schema import Config
from data.corpus_rows import CorpusRows
from data.feature_manifest import ShardEntry
from data.feature_shards import FeatureLayout, FeatureRow, write_shard
from extract.batches import CorpusSlice
from extract.board import Board
from extract.claims import Claims, ClaimsGoFirst
from extract.pipeline import Pipeline, Stage
from extract.reporter import Reporter
from extract.selected_rows import SelectedRows
from extract.slices import Batch, Extracted, SliceBuilder, SliceForward
from extract.work import ExtractWork, ShardRecord, require_few, shard_name, write_record
from target.load import Target


@dataclass(frozen=True)
class Tools:
    """What a worker works with."""

    config: Config
    work: ExtractWork
    claims: Claims
    board: Board
    corpus: CorpusRows | SelectedRows
    target: Target
    tap_rms: Tensor
    reporter: Reporter
    first_rows: dict[str, Any] | None = None
    """What the manifest keeps of the check of the first rows."""


def make_free_shards(tools: Tools) -> None:
    """Every shard that is to be had, until all are done or others' work. Raises what went wrong in any step."""
    forward = SliceForward(tools.config, tools.target)
    builder = SliceBuilder(forward, tools.tap_rms)
    writer = _Writer(tools)
    stages = [
        Stage("copy", lambda item: _collect(builder, item)),
        Stage("write", writer.write, num_threads=tools.config.extract.writers),
    ]
    with Pipeline(stages) as pipeline, ClaimsGoFirst(tools.claims):
        for cut in tools.board.take_all():
            part = CorpusSlice(cut.index, tools.corpus.read(cut.start, cut.stop))
            for batch in forward.batches(part):
                pipeline.put(batch)
                tools.claims.worked()
                tools.reporter.add_batch(batch.input_ids.numel(), batch.num_padding)
            pipeline.put(part)


def _collect(builder: SliceBuilder, item: Batch | CorpusSlice) -> Extracted | None:
    """Batches of a slice, then the slice itself, which ends it."""
    if isinstance(item, Batch):
        builder.add(item)
        return None
    return builder.finish(item)


class _Writer:
    def __init__(self, tools: Tools):
        self.tools, extract = tools, tools.config.extract
        self.layout = FeatureLayout(
            extract.codec,
            len(tools.config.drafter.target_layer_ids),
            tools.config.target.hidden_size,
            extract.soft_labels,
        )

    def write(self, extracted: Extracted) -> None:
        """Store a shard and its sidecar, and give its claim up. Raises ValueError if too many rows were bad."""
        tools = self.tools
        lost = tools.reporter.add_quarantined(extracted.quarantined)
        require_few(lost, len(tools.corpus.lengths), tools.config.extract.max_quarantined)
        record = write_extracted(tools.work, self.layout, extracted)
        tools.reporter.add_record(extracted.index, record)
        tools.board.set_done(extracted.index)
        tools.claims.worked()


def write_extracted(work: ExtractWork, layout: FeatureLayout, extracted: Extracted) -> ShardRecord:
    """The shard, whole or not at all, then its sidecar."""
    name = shard_name(extracted.index)
    with work.storage.aside(name) as path:
        write_shard(path, extracted.rows, layout)
        entry = ShardEntry(
            file=name,
            num_rows=len(extracted.rows),
            num_tokens=sum(len(row.input_ids) for row in extracted.rows),
            num_bytes=path.stat().st_size,
            sha256=sha256_file(path),
            rows=[_entry_row(row) for row in extracted.rows],
        )
        work.storage.put(name, path)
    record = ShardRecord(entry, extracted.quarantined)
    write_record(work, record)
    return record


def _entry_row(row: FeatureRow) -> dict[str, str | int]:
    return {
        "sample_id": row.sample_id,
        "source": row.source,
        "task": row.task,
        "split": row.split,
        "num_tokens": len(row.input_ids),
        "num_response_tokens": int(row.loss_mask.sum()),
    }
