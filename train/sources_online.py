"""Features computed in the trainer's process, by a target small enough to live beside the drafter: no disk, no second command.

The batches that the target reads are those that extraction would make of the same block, so that the bits are the same. A rank
computes the batches that hold a row of its own, and keeps its own rows of the current windows in memory; so with more ranks each
does less than all, but not its share: what is too slow here is what `source: stream` is for.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from data.codecs import decode, encode
from data.corpus import CorpusRow
from data.feature_manifest import QuarantinedRow
from data.feature_shards import FeatureRow
from data.features import RowEntry
from extract.batches import CorpusSlice, length_batches
from extract.checks import ids_problem
from extract.slices import extract_slice
from extract.stream_plan import StreamPlan
from extract.stream_ring import block_of
from extract.work import require_few
from target.load import Target
from train.order import WindowOrder
from train.sources import AnyRow, OwnSamples, Source, absent_row

logger = logging.getLogger(__name__)


class OnlineSource(Source):
    def __init__(self, plan: StreamPlan, order: WindowOrder, target: Target, tap_rms: Tensor):
        """tap_rms (D,): the corpus' first rows (extract/checks.py)."""
        self.plan, self.order, self.target, self.tap_rms = plan, order, target, tap_rms
        self._needed: dict[int, set[str]] = {}  # sample ids by window
        self._rows: dict[str, FeatureRow | None] = {}  # None: failed its checks
        self._quarantined: dict[str, QuarantinedRow] = {}
        self._batches = lru_cache(maxsize=4 * plan.windows.sequence.window)(self._make_batches)

    def prepare(self, consumed: int, own: OwnSamples) -> None:
        batch, windows = self.plan.config.train.global_batch_samples, self.plan.windows
        first, last = windows.window_of(consumed), windows.window_of(consumed + batch - 1)
        self._needed = {
            window: self._needed.get(window) or self._ids(window, own)
            for window in range(first, last + 1)
        }
        kept = self._kept()
        self._rows = {sample_id: row for sample_id, row in self._rows.items() if sample_id in kept}

    def read(self, entry: RowEntry) -> AnyRow:
        if entry.sample_id not in self._rows:
            self._compute(entry)
        return self._rows[entry.sample_id] or absent_row(entry, self.plan.layout)

    def _kept(self) -> set[str]:
        return set().union(*self._needed.values())

    def _ids(self, window: int, own: OwnSamples) -> set[str]:
        """This rank's samples of all steps that touch the window."""
        batch = self.plan.config.train.global_batch_samples
        numbers = self.plan.windows.samples_of(window)
        starts = range(numbers.start - numbers.start % batch, numbers.stop, batch)
        return {sample.entry.sample_id for start in starts for sample in own(start)}

    def _compute(self, entry: RowEntry) -> None:
        """The row, and with it those of its batch that this rank comes to."""
        block = block_of(entry.shard)
        rows = next(rows for rows in self._batches(block) if _holds(rows, entry))
        part = CorpusSlice(block, rows)
        extracted = extract_slice(self.plan.config, self.target, part, self.tap_rms)
        kept = self._kept() | {entry.sample_id}
        for row in extracted.rows:
            if row.sample_id in kept:
                self._rows[row.sample_id] = self._as_stored(row)
        for row in extracted.quarantined:
            if row.sample_id not in self._quarantined:
                logger.warning("sample %s is not trained on: %s", row.sample_id, row.reason)
            self._quarantined[row.sample_id] = row
            if row.sample_id in kept:
                self._rows[row.sample_id] = None
        plan = self.plan
        most = plan.config.extract.max_quarantined
        require_few(self._quarantined.values(), len(plan.rows.lengths), most)

    def _make_batches(self, block: int) -> list[list[CorpusRow]]:
        """The rows of a block as extraction batches them; rows whose ids cannot be read are each alone."""
        cut, extract = self.plan.cuts[block], self.plan.config.extract
        rows = self.plan.rows.read(cut.start, cut.stop)
        vocab_size = self.target.vocab_size
        readable = [row for row in rows if ids_problem(row, vocab_size) is None]
        lengths = [row.num_tokens for row in readable]
        batches = length_batches(lengths, extract.batch_tokens, extract.max_padding)
        bad = [[row] for row in rows if ids_problem(row, vocab_size) is not None]
        return [[readable[index] for index in batch] for batch in batches] + bad

    def _as_stored(self, row: FeatureRow) -> FeatureRow:
        """With what the codec rounds rounded: the same bits as from a shard."""
        layout = self.plan.layout
        features = decode(
            encode(row.features, layout.codec),
            len(row.input_ids),
            layout.num_taps,
            layout.hidden_size,
            layout.codec,
        )
        return replace(row, features=features)


def _holds(rows: list[CorpusRow], entry: RowEntry) -> bool:
    return any(row.sample_id == entry.sample_id for row in rows)
