"""What is streamed: the training rows cut into blocks, the windows of the run, and the room that they need.

Both sides make it for themselves, from the corpus and the recipe; no feature is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.fingerprint import fingerprint, require_equal
from configs.schema import Config
from data.corpus import read_corpus_manifest
from data.feature_shards import FeatureLayout
from data.features import RowEntry
from extract.batches import ShardCut, cut_lengths, shard_tokens
from extract.plan import format_bytes, plan_extract, raw_bytes_per_token
from extract.selected_rows import SelectedRows, training_rows
from extract.stream_order import BlockSequence, SampleWindows
from extract.stream_ring import Cursor, block_file, cursor_at

ROW_BYTES = 8192  # of a row's own Parquet pages, levels and footer entries, at most
TOKEN_BYTES = 8  # of ids and loss mask


@dataclass(frozen=True)
class StreamPlan:
    config: Config
    rows: SelectedRows
    """The training rows."""
    cuts: list[ShardCut]
    """Where the blocks lie in them."""
    windows: SampleWindows
    layout: FeatureLayout
    fingerprint: str
    """Of what decides every block's bytes and the order."""

    @property
    def total(self) -> int:
        """Samples of the whole run."""
        return self.config.train.steps * self.config.train.global_batch_samples

    def max_bytes(self, block: int) -> int:
        """What a block takes in the ring, at most."""
        cut = self.cuts[block]
        per_token = sum(column.bytes_per_token for column in self.layout.columns) + TOKEN_BYTES
        return cut.num_tokens * per_token + cut.num_rows * ROW_BYTES

    def cursor(self, saved: int, trained: int) -> Cursor:
        """saved, trained: samples (extract/stream_ring.py)."""
        batch = self.config.train.global_batch_samples
        cursor = cursor_at(self.fingerprint, self.windows, saved, trained, batch, self.total)
        return replace(cursor, run=str(self.config.run.folder.resolve()))

    def most_at_once(self) -> int:
        """Bytes of the blocks that some step cannot do without, at most: a step may begin at a window's last sample."""
        last = self.windows.window_of(self.total - 1)
        return max(self._bytes_from_end_of(window) for window in range(last + 1))

    def _bytes_from_end_of(self, window: int) -> int:
        first = min(self.windows.samples_of(window).stop, self.total) - 1
        count = min(self.config.train.global_batch_samples, self.total - first)
        blocks = self.windows.sequence.distinct_blocks(self.windows.positions(first, count))
        return sum(self.max_bytes(block) for block in blocks)

    def require_room(self) -> int:
        """The ring's bytes. Raises ValueError if some step could never begin."""
        budget = self.config.train.stream_bytes
        assert budget is not None  # the schema requires it of a stream
        if (needed := self.most_at_once()) > budget:
            raise ValueError(
                f"train.stream_bytes={budget} ({format_bytes(budget)}) is too little: some step of "
                f"train.global_batch_samples={self.config.train.global_batch_samples} needs windows of "
                f"train.shuffle_window={self.config.train.shuffle_window} blocks with up to {format_bytes(needed)}; raise it "
                f"to {needed}, or lower train.shuffle_window or extract.shard_bytes"
            )
        return budget


def plan_stream(config: Config, settings: Mapping[str, Any]) -> StreamPlan:
    """settings: of the features (ExtractWork.settings, or the held-out rows' manifest).

    Raises FileNotFoundError or ValueError if the corpus is missing, another one, or has no training rows.
    """
    folder = config.run.folder / "corpus"
    corpus = read_corpus_manifest(folder)
    if corpus.fingerprint != settings["corpus"]:
        raise ValueError(
            f"the corpus in {folder} is not the one that {config.features_location} was made from; bring back the corpus, or "
            "give this run another run.output_dir and extract again"
        )
    _require_same_blocks(config, settings)
    rows = training_rows(folder, corpus)
    if not len(rows.lengths):
        raise ValueError(f"the corpus in {folder} has no rows of split `train`; add sources")
    tokens = shard_tokens(
        config.extract.shard_bytes, raw_bytes_per_token(plan_extract(config, corpus))
    )
    cuts = cut_lengths(rows.lengths.tolist(), tokens)
    window = config.train.shuffle_window
    assert window is not None  # the schema requires it
    sequence = BlockSequence(len(cuts), window, config.run.seed)
    layout = FeatureLayout(
        config.extract.codec,
        len(config.drafter.target_layer_ids),
        config.target.hidden_size,
        config.extract.soft_labels,
    )
    return StreamPlan(
        config,
        rows,
        cuts,
        SampleWindows(sequence, [cut.num_rows for cut in cuts]),
        layout,
        fingerprint([dict(settings), window, config.run.seed]),
    )


def _require_same_blocks(config: Config, settings: Mapping[str, Any]) -> None:
    """Raises ValueError if this recipe cuts or stores blocks in another way than the features' does: rows would be looked for
    in blocks that do not hold them."""
    wanted = {key: getattr(config.extract, key) for key in ("codec", "shard_bytes", "soft_labels")}
    require_equal(
        f"the features in {config.features_location}",
        {f"extract.{key}": settings.get(key, 0) for key in wanted},
        {f"extract.{key}": value for key, value in wanted.items()},
        "set it back, or extract again into another folder (extract.folder, run.output_dir)",
    )


def block_entries(plan: StreamPlan) -> list[list[RowEntry]]:
    """The rows of every block; `shard` is the block's file in the ring and `row` the place in the block."""
    names = ("sample_id", "source", "task", "split", "num_tokens", "num_response_tokens")
    values = list(zip(*(plan.rows.column(name).tolist() for name in names), strict=True))
    return [
        [
            RowEntry(*values[number], shard=block_file(cut.index), row=number - cut.start)
            for number in range(cut.start, cut.stop)
        ]
        for cut in plan.cuts
    ]
