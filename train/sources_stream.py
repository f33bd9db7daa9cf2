"""The training side of a stream: waits for the blocks of a step, reads them, and says how far it is.

Every rank waits for all blocks of a step, its own and the others', so that none waits for another inside a collective; the main
rank writes the cursor. Where the extracting side is absent, it says how to start it, and waits.
"""

from __future__ import annotations

import logging
import threading

import pyarrow as pa
import pyarrow.parquet as pq

from common.progress import format_duration
from common.waiting import Waiting
from data.feature_shards import FeatureLayout, StoredRow, read_stored_row
from data.features import RowEntry, open_stored_shard
from extract.stream_plan import StreamPlan
from extract.stream_ring import CURSOR_FILE, BlockRecord, Cursor, Ring, block_file, block_of
from train.order import WindowOrder
from train.sources import AnyRow, OwnSamples, Source, SourceClosed, absent_row

logger = logging.getLogger(__name__)


class StreamSource(Source):
    def __init__(self, plan: StreamPlan, ring: Ring, order: WindowOrder, is_main: bool):
        self.plan, self.ring, self.order, self.is_main = plan, ring, order, is_main
        self._closed = threading.Event()
        self._open: dict[str, _OpenBlock] = {}
        self._saved: int | None = None
        self._last: Cursor | None = None
        self._cursor_lock = threading.Lock()

    def require_free(self) -> Cursor | None:
        """The cursor. Raises ValueError if another run, which has not come to its end, reads this stream."""
        cursor, here = self.ring.read_cursor(), self.plan.cursor(0, 0)
        if cursor is None or cursor.is_done or cursor.run in (None, here.run):
            return cursor
        raise ValueError(
            f"the stream in {self.ring.storage.url} belongs to the run in {cursor.run}, which has not ended, and this run is in "
            f"{here.run}; give it another extract.folder, or, if the other is over, delete "
            f"{self.ring.storage.location(CURSOR_FILE)}"
        )

    def prepare(self, consumed: int, own: OwnSamples) -> None:
        samples = self.order.samples(consumed, self.plan.config.train.global_batch_samples)
        needed = sorted({sample.entry.shard for sample in samples})
        self._drop_all_but(consumed, len(samples))
        missing = [file for file in needed if file not in self._open]
        for place, file in enumerate(missing):
            self._await(file, f"{len(needed) - len(missing) + place} of {len(needed)}")

    def read(self, entry: RowEntry) -> AnyRow:
        while True:
            block = self._open[entry.shard]
            if entry.sample_id in block.quarantined:
                return absent_row(entry, self.plan.layout)
            row = block.row_of.get(entry.sample_id)
            assert row is not None, f"{entry.shard} of this plan does not know {entry.sample_id}"
            try:
                return block.read(entry, row, self.plan.layout)
            except FileNotFoundError:  # a worker that had not seen our cursor yet made room
                self._await(entry.shard, "it was there and is gone again; the others")
            except (pa.ArrowException, OSError, ValueError) as error:
                where = self.ring.storage.location(entry.shard)
                raise ValueError(
                    f"streamed block {where}, row {row} (sample {entry.sample_id}) cannot be read: {error}; delete it, "
                    "`./launch.sh extract` makes it again"
                ) from error

    def trained(self, samples: int) -> None:
        if self._saved is None:
            self._saved = samples  # where this run starts
        self._publish(samples)

    def saved(self, samples: int) -> None:
        self._saved = samples
        self._publish(samples)

    def close(self) -> None:
        self._closed.set()

    def _publish(self, trained: int) -> None:
        if not self.is_main:
            return
        assert self._saved is not None
        cursor = self.plan.cursor(self._saved, trained)
        if cursor != self._last:
            with self._cursor_lock:
                self._last = cursor
                self.ring.write_cursor(cursor)
        if cursor.is_done:
            self.ring.clear()  # no worker may be there to do it

    def _await(self, file: str, have: str) -> None:
        """Open the block, once it is there."""
        self._open.pop(file, None)
        waiting = Waiting(self._closed)
        while (block := self._look(file)) is None:
            if self._closed.is_set():
                raise SourceClosed
            self._keep_cursor()
            waiting.pause(
                lambda: (
                    f"waiting for {self.ring.storage.location(file)} ({have} blocks of this step are there): if it is not "
                    "running, start `./launch.sh extract` with this recipe"
                )
            )
        if waiting.elapsed_s > 1:
            logger.info("%s came after %s", file, format_duration(waiting.elapsed_s))
        self._open[file] = block

    def _keep_cursor(self) -> None:
        """Workers follow the cursor: wait with this run's, and not if another run has put its own there."""
        if not self.is_main:
            self.require_free()
            return
        with self._cursor_lock:
            if self.require_free() != self._last and self._last is not None:
                self.ring.write_cursor(self._last)

    def _look(self, file: str) -> _OpenBlock | None:
        record = self.ring.read_record(block_of(file))
        if record is None or record.plan != self.plan.fingerprint:
            return None
        try:
            return _OpenBlock(record, open_stored_shard(self.ring.storage, file))
        except FileNotFoundError:
            return None

    def _drop_all_but(self, consumed: int, count: int) -> None:
        """Blocks of windows that are behind."""
        positions = self.plan.windows.positions(consumed, count)
        kept = {block_file(b) for b in self.plan.windows.sequence.distinct_blocks(positions)}
        for file in [file for file in self._open if file not in kept]:
            self._open.pop(file).file.close()


class _OpenBlock:
    def __init__(self, record: BlockRecord, file: pq.ParquetFile):
        self.file = file
        self.row_of = {sample_id: row for row, sample_id in enumerate(record.sample_ids)}
        self.quarantined = {sample_id for sample_id, _ in record.quarantined}

    def read(self, entry: RowEntry, row: int, layout: FeatureLayout) -> StoredRow:
        found = read_stored_row(self.file, row, layout)
        if (found.sample_id, len(found.input_ids)) != (entry.sample_id, entry.num_tokens):
            raise ValueError(f"it holds sample {found.sample_id}")
        return found
