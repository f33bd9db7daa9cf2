"""The extracting side of a stream: keeps the ring filled with the blocks that the trainer comes to, within a budget of bytes.

Any number of workers on any machines, as for shards: a claim a block, double work harmless. A worker knows nothing but the corpus,
the trainer's cursor and what is in the ring, so it may be killed and started at any time, and so may the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from common.fingerprint import require_equal
from common.waiting import FIRST_LINE_S, LINE_EVERY_S, Waiting
from configs.schema import Config
from data.feature_manifest import QuarantinedRow
from data.feature_shards import write_shard
from extract.batches import CorpusSlice
from extract.claims import Claims, ClaimsGoFirst
from extract.pipeline import Pipeline, Stage
from extract.plan import ExtractPlan, format_bytes
from extract.slices import Batch, Extracted, SliceBuilder, SliceForward
from extract.stream_plan import StreamPlan, plan_stream
from extract.stream_ring import CLAIMS, BlockRecord, Cursor, Ring, block_file, wanted_blocks
from extract.work import ExtractWork, require_few
from target.load import Target

logger = logging.getLogger(__name__)

REMEDY = (
    "give both sides the same train.shuffle_window, run.seed and corpus; remove its `stream` folder and the run's checkpoints if "
    "these have changed, or give this run another run.output_dir"
)


@dataclass(frozen=True)
class Stream:
    plan: StreamPlan
    ring: Ring
    budget: int
    """Bytes."""

    def read_cursor(self) -> Cursor | None:
        """The trainer's. Raises ValueError if it is not of this recipe."""
        cursor = self.ring.read_cursor()
        if cursor is not None:
            require_equal(
                f"the stream in {self.ring.storage.url}",
                {"stream": cursor.plan[:12]},
                {"stream": self.plan.fingerprint[:12]},
                REMEDY,
            )
        return cursor

    def is_trained(self) -> bool:
        """Whether the trainer needs nothing more. Then nothing is left in the ring either."""
        cursor = self.read_cursor()
        if cursor is None or not cursor.is_done or self.goes_on(cursor):
            return False
        self.ring.clear()
        return True

    def goes_on(self, cursor: Cursor) -> bool:
        """Whether this recipe trains for more steps than the run that wrote `cursor` did."""
        return cursor.total is not None and cursor.total < self.plan.total

    def require_disk(self, plan: ExtractPlan) -> None:
        """Raises ValueError if the disk does not hold the ring and the held-out rows."""
        if plan.free_bytes is None or plan.num_tokens is None:  # a bucket
            return
        held_out = plan.num_tokens - int(self.plan.rows.lengths.sum())
        needed = self.budget + held_out * plan.stored_bytes_per_token(plan.codec)
        if needed > plan.free_bytes + sum(self.ring.present().values()):
            raise ValueError(
                f"the stream needs {format_bytes(needed)} (train.stream_bytes={self.budget} and the held-out rows), and "
                f"{self.ring.storage.url} has {format_bytes(plan.free_bytes)} free; lower train.stream_bytes (the least: "
                f"{self.plan.most_at_once()}), or --ignore-disk starts anyway"
            )


def open_stream(config: Config, work: ExtractWork) -> Stream:
    """Raises ValueError if the ring has too little room, or a trainer with other settings reads from it."""
    plan = plan_stream(config, work.settings)
    stream = Stream(plan, Ring(work.storage), plan.require_room())
    stream.read_cursor()
    return stream


def fill_ring(stream: Stream, target: Target, tap_rms: Tensor) -> None:
    """Make blocks until the trainer has trained to its end. Raises what went wrong in a step, and if too many rows are bad."""
    plan, extract = stream.plan, stream.plan.config.extract
    forward = SliceForward(plan.config, target)
    builder = SliceBuilder(forward, tap_rms)
    stream.ring.storage.remove_leftovers()  # of killed workers, beside the budget
    with Claims(stream.ring.storage, extract.lease_s, prefix=CLAIMS) as claims:
        worker = StreamWorker(stream, claims)
        stages = [
            Stage("copy", lambda item: _collect(builder, item)),
            Stage("write", worker.store, num_threads=extract.writers),
        ]
        with Pipeline(stages) as pipeline, ClaimsGoFirst(claims):
            for block in worker.take_all(pipeline.require_sound):
                cut = plan.cuts[block]
                part = CorpusSlice(block, plan.rows.read(cut.start, cut.stop))
                for batch in forward.batches(part):
                    pipeline.put(batch)
                    claims.worked()
                pipeline.put(part)
    stream.ring.clear()


def _collect(builder: SliceBuilder, item: Batch | CorpusSlice) -> Extracted | None:
    """Batches of a slice, then the slice itself, which ends it."""
    if isinstance(item, Batch):
        builder.add(item)
        return None
    return builder.finish(item)


class StreamWorker:
    """Which block next, and its way into the ring."""

    def __init__(self, stream: Stream, claims: Claims):
        self.stream, self.claims = stream, claims
        self.plan, self.ring, self.budget = stream.plan, stream.ring, stream.budget
        self._start = time.monotonic()
        self._next_line_s = FIRST_LINE_S
        self._lock = threading.Lock()
        self._at_work: set[int] = set()
        self._ours: set[int] = set()  # present, and of this plan
        self._quarantined: dict[str, QuarantinedRow] = {}
        self._num_made = self._num_tokens = 0

    def take_all(self, require_sound: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Blocks that this worker has claimed, as they come to be wanted; ends with the training.

        require_sound: raises what went wrong with a block that was taken: it may be all that the ring has room for.
        """
        while True:
            waiting = Waiting()
            while (block := self.take()) is None:
                require_sound()
                if self.stream.is_trained():
                    return
                self.claims.worked()  # a full ring is no stall
                waiting.pause(self._describe)
            yield block

    def store(self, extracted: Extracted) -> None:
        """The block, then its record, then the claim is given up. Raises ValueError if too many rows were bad."""
        plan, block = self.plan, extracted.index
        lost = self._add_quarantined(extracted.quarantined)
        require_few(lost, len(plan.rows.lengths), plan.config.extract.max_quarantined)
        with self.ring.storage.aside(block_file(block)) as path:
            write_shard(path, extracted.rows, plan.layout)
            record = BlockRecord(
                plan.fingerprint,
                path.stat().st_size,
                [row.sample_id for row in extracted.rows],
                [[row.sample_id, row.reason] for row in extracted.quarantined],
            )
            assert record.num_bytes <= plan.max_bytes(block), "the ring's budget would not hold"
            self.ring.storage.put(block_file(block), path)
        self.ring.write_record(block, record)
        self.claims.give_up(_claim(block))
        self.claims.worked()
        with self._lock:
            self._at_work.discard(block)
            self._num_made += 1
            self._num_tokens += sum(len(row.input_ids) for row in extracted.rows)
        self._report()

    def take(self) -> int | None:
        """A wanted block that is neither there nor at work; None if there is none now."""
        cursor = self.stream.read_cursor() or self.plan.cursor(0, 0)
        present = self._present()
        wanted = wanted_blocks(
            cursor,
            self.plan.windows.sequence,
            lambda block: present.get(block, self.plan.max_bytes(block)),
            self.budget,
        )
        with self._lock:
            at_work = set(self._at_work)
        # what this worker is writing is not there yet, and what is not wanted any more makes room
        self.ring.keep_only({*wanted, *at_work})
        for block in wanted:
            if block not in present and block not in at_work and self._claim(block):
                if not self.ring.holds(block):
                    with self._lock:
                        self._at_work.add(block)
                    return block
                self.claims.give_up(_claim(block))  # another worker was faster
        return None

    def _present(self) -> dict[int, int]:
        """The ring's blocks. Those of another recipe, which the trainer would never take, go."""
        present = self.ring.present()
        for block in present.keys() - self._ours:
            record = self.ring.read_record(block)
            if record is not None and record.plan != self.plan.fingerprint:
                logger.warning("block %d of another recipe is removed from the ring", block)
                self.ring.drop(block)
                del present[block]
        self._ours = {*present}
        return present

    def _claim(self, block: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # the claims' folder went with the training
            return self.claims.take(_claim(block))
        return False

    def _add_quarantined(self, rows: list[QuarantinedRow]) -> list[QuarantinedRow]:
        """All of this worker so far, each once however many epochs it failed in."""
        with self._lock:
            for row in rows:
                if row.sample_id not in self._quarantined:
                    logger.warning("quarantined sample %s: %s", row.sample_id, row.reason)
                self._quarantined[row.sample_id] = row
            return list(self._quarantined.values())

    def _report(self) -> None:
        elapsed = time.monotonic() - self._start
        if elapsed >= self._next_line_s:
            self._next_line_s = elapsed + LINE_EVERY_S
            logger.info("%s, %.0f tokens/s", self._describe(), self._num_tokens / elapsed)

    def _describe(self) -> str:
        present, cursor = self.ring.present(), self.ring.read_cursor()
        held = f"{len(present)} block{'s' * (len(present) != 1)}, {format_bytes(sum(present.values()))} of {format_bytes(self.budget)}"
        if cursor is None:
            return f"stream: {held}; no trainer yet: start `./launch.sh train` with this recipe"
        if cursor.is_done:
            return (
                f"stream: the trainer has ended after {cursor.total} samples, this recipe trains on {self.plan.total}: "
                "start `./launch.sh train` with this recipe"
            )
        return (
            f"stream: {held}; {self._num_made} made here; the trainer is at block {cursor.next} of {cursor.end} "
            "(is it running? else start `./launch.sh train` with this recipe)"
        )


def _claim(block: int) -> str:
    return f"block-{block:08d}"
