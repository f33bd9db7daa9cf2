"""One line on the whole extraction and this worker's part in it: from the cut, the sidecars and the claims.

    extract: 41,200/913,000 rows, 12,345 tokens/s, 0.44 GB/s, ETA 2d07h, 2 quarantined, 8 workers; this one 1,544 tokens/s, ...

Other workers are seen only by what they leave in the folder; nobody reports to anybody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.progress import format_duration
from common.wandb_run import WandbRun
from data.feature_manifest import QuarantinedRow
from extract.batches import ShardCut
from extract.claims import workers
from extract.work import ExtractWork, ShardRecord, read_records, record_name

logger = logging.getLogger("progress")

EVERY_S, BUCKET_EVERY_S = 5.0, 60.0  # a listing of a bucket takes a call a thousand names
WINDOW = 12  # rates are over so many lines


@dataclass(frozen=True)
class Totals:
    """What is in the folder, whoever made it."""

    rows: int
    tokens: int
    num_bytes: int
    """Stored."""
    quarantined: int
    at_s: float


class Reporter:
    """Counts this worker's work, and from `start` on says every few seconds how far all workers are."""

    def __init__(
        self,
        work: ExtractWork,
        cuts: Sequence[ShardCut],
        curve: WandbRun | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.work, self.cuts, self.curve, self.clock = work, cuts, curve, clock
        self._num_rows = sum(cut.num_rows for cut in cuts)
        self._lock = threading.Lock()
        self._records: dict[int, tuple[int, int]] = {}  # stored bytes, quarantined rows
        self._own: set[int] = set()
        self._quarantined: list[QuarantinedRow] = []
        self._padded = self._padding = 0
        self._start = clock()
        self._window: deque[Totals] = deque(maxlen=WINDOW)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report_on, name="progress", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def add_batch(self, num_tokens: int, num_padding: int) -> None:
        """A forward of this worker, padding included."""
        with self._lock:
            self._padded += num_tokens
            self._padding += num_padding

    def add_quarantined(self, rows: Sequence[QuarantinedRow]) -> list[QuarantinedRow]:
        """Gives all that this worker has quarantined."""
        with self._lock:
            self._quarantined += rows
            return list(self._quarantined)

    def add_record(self, index: int, record: ShardRecord) -> None:
        """A shard that this worker has made."""
        with self._lock:
            self._own.add(index)
            self._records[index] = record.shard.num_bytes, len(record.quarantined)

    def totals(self) -> Totals:
        """Of all workers, by the sidecars; each is read once."""
        names = {*self.work.storage.names("shard-")}
        done = [cut for cut in self.cuts if record_name(cut.index) in names]
        with self._lock:
            unread = [cut.index for cut in done if cut.index not in self._records]
        found = dict(zip(unread, read_records(self.work, unread), strict=True))
        with self._lock:
            for index, record in found.items():
                if record is not None:
                    self._records[index] = record.shard.num_bytes, len(record.quarantined)
            known = [self._records[cut.index] for cut in done if cut.index in self._records]
        return Totals(
            sum(cut.num_rows for cut in done),
            sum(cut.num_tokens for cut in done),
            sum(num_bytes for num_bytes, _ in known),
            sum(quarantined for _, quarantined in known),
            self.clock(),
        )

    def metrics(self, totals: Totals) -> dict[str, float]:
        """`extract/...` of all workers since the first totals of the window, and of this one since its start."""
        self._window.append(totals)
        first = self._window[0]
        passed = max(totals.at_s - first.at_s, 1e-9)
        with self._lock:
            own_tokens = self._padded - self._padding
            own = {
                "extract/worker_rows": sum(self.cuts[index].num_rows for index in self._own),
                "extract/worker_tokens_per_s": own_tokens / max(totals.at_s - self._start, 1e-9),
                "extract/worker_quarantined": len(self._quarantined),
                "extract/padding": self._padding / max(self._padded, 1),
            }
        return {
            "extract/rows": totals.rows,
            "extract/tokens_per_s": (totals.tokens - first.tokens) / passed,
            "extract/gb_per_s": (totals.num_bytes - first.num_bytes) / passed / 1e9,
            "extract/quarantined": totals.quarantined,
            "extract/workers": len(workers(self.work.storage)),
            **own,
        }

    def begin(self) -> None:
        """Rates count from what is there now."""
        self._window.append(self.totals())

    def report(self) -> None:
        """One line, and the same to W&B."""
        totals = self.totals()
        metrics = self.metrics(totals)
        logger.info("%s", self._line(totals, metrics))
        if self.curve:
            self.curve.log(dict(metrics))

    def _line(self, totals: Totals, metrics: dict[str, float]) -> str:
        left, rate = (
            sum(c.num_tokens for c in self.cuts) - totals.tokens,
            metrics["extract/tokens_per_s"],
        )
        eta = f"ETA {format_duration(left / rate)}" if rate > 0 else "ETA unknown"
        return (
            f"extract: {totals.rows:,}/{self._num_rows:,} rows, {rate:,.0f} tokens/s, "
            f"{metrics['extract/gb_per_s']:.3g} GB/s, {eta}, {totals.quarantined} quarantined, "
            f"{_counted(metrics['extract/workers'], 'worker')}; this one: {metrics['extract/worker_rows']:,.0f} rows, "
            f"{metrics['extract/worker_tokens_per_s']:,.0f} tokens/s, padding {metrics['extract/padding']:.1%}, "
            f"{metrics['extract/worker_quarantined']:.0f} quarantined"
        )

    def _report_on(self) -> None:
        """A line that cannot be written stops no work."""
        every_s = EVERY_S if self.work.storage.folder else BUCKET_EVERY_S
        step = self.begin
        while True:
            try:
                step()
            except OSError as error:
                logger.warning("no progress line: %s", error)
            step = self.report
            if self._stop.wait(every_s):
                return


def _counted(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}" + ("s" if number != 1 else "")
