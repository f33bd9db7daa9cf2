"""Which shard next: what is done, what others have claimed, and the claim on one that is free.

A worker walks along the corpus. Where it meets what another has claimed or done it looks at the folder again and jumps to a free
shard anywhere, so that many workers seldom try for the same one and nobody is told who the others are.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence

from data.feature_manifest import MANIFEST_FILE
from extract.batches import ShardCut
from extract.claims import Claims, claimed
from extract.work import ExtractWork, record_name, shard_name


class Board:
    """One worker's view of the shards; `done` only grows until `refresh` looks again."""

    def __init__(self, work: ExtractWork, claims: Claims, cuts: Sequence[ShardCut]):
        self.work, self.claims, self.cuts = work, claims, cuts
        self._lock = threading.Lock()
        self._done: set[int] = set()
        self._others: set[int] = set()
        self._last = -1
        self._random = random.Random(claims.worker)  # where it works changes no byte
        self.refresh()

    @property
    def done(self) -> set[int]:
        with self._lock:
            return set(self._done)

    @property
    def is_all_done(self) -> bool:
        with self._lock:
            return len(self._done) == len(self.cuts)

    def is_finished(self) -> bool:
        """Whether some worker has written the manifest."""
        return self.work.storage.exists(MANIFEST_FILE)

    def refresh(self) -> None:
        """Look at sidecars and claims again."""
        claims = {*claimed(self.work.storage)} - {*self.claims.held}
        names = {*self.work.storage.names("shard-")}
        with self._lock:
            self._done = {cut.index for cut in self.cuts if record_name(cut.index) in names}
            self._others = {cut.index for cut in self.cuts if shard_name(cut.index) in claims}

    def set_done(self, index: int) -> None:
        with self._lock:
            self._done.add(index)
        self.claims.give_up(shard_name(index))

    def take_all(self) -> Iterator[ShardCut]:
        """Shards that this worker has claimed, one after another, until none is free; then those whose worker is dead."""
        while (cut := self._take_next()) is not None or (cut := self._take_abandoned()) is not None:
            self._last = cut.index
            yield cut

    def _take_next(self) -> ShardCut | None:
        beside = self._last + 1
        if self._is_free(beside) and self._take(beside):
            return self.cuts[beside]
        self.refresh()
        while free := [cut.index for cut in self.cuts if self._is_free(cut.index)]:
            # alone: from the front; else anywhere, for the others do the same
            index = self._random.choice(free) if self._others else free[0]
            if self._take(index):
                return self.cuts[index]
        return None

    def _take_abandoned(self) -> ShardCut | None:
        for index in sorted(self._others):
            if self._take(index):
                return self.cuts[index]
        return None

    def _take(self, index: int) -> bool:
        """False, and known as another's or done, if it is."""
        name, taken = shard_name(index), False
        with contextlib.suppress(FileNotFoundError):  # the set was finished and its claims cleared
            taken = self.claims.take(name)
        if taken and (self.work.storage.exists(record_name(index)) or self.is_finished()):
            self.claims.give_up(name)
            with self._lock:
                self._done.add(index)
            return False
        with self._lock:
            (self._others.discard if taken else self._others.add)(index)
        return taken

    def _is_free(self, index: int) -> bool:
        with self._lock:
            known = index in self._done or index in self._others or index >= len(self.cuts)
        return not known and not self.claims.holds(shard_name(index))
