"""Which samples come when: an endless seeded sequence of epochs, a function of its place alone.

Whatever the ranks, the source of the features or the history of a run, sample number n is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from data.features import RowEntry
from extract.stream_order import SampleWindows, seeded_order


@dataclass(frozen=True)
class Sample:
    """A document as an epoch sees it: the epoch chooses its anchors."""

    entry: RowEntry
    epoch: int


class Order(Protocol):
    def samples(self, consumed: int, count: int) -> list[Sample]:
        """Samples number `consumed`..`consumed + count - 1`."""
        ...


@dataclass(frozen=True)
class FullOrder:
    """Every epoch is a permutation of all rows."""

    entries: Sequence[RowEntry]
    seed: int

    def samples(self, consumed: int, count: int) -> list[Sample]:
        samples = []
        for position in range(consumed, consumed + count):
            epoch, index = divmod(position, len(self.entries))
            order = seeded_order(len(self.entries), f"epoch {self.seed} {epoch}")
            samples.append(Sample(self.entries[order[index]], epoch))
        return samples


class WindowOrder:
    """Every epoch takes blocks in a seeded order and shuffles the rows of a window of blocks: what a stream can follow."""

    def __init__(self, blocks: Sequence[Sequence[RowEntry]], windows: SampleWindows):
        """blocks: their rows, in corpus order."""
        self.blocks, self.windows = blocks, windows
        self._shuffled = lru_cache(maxsize=4)(self._shuffle)

    def samples(self, consumed: int, count: int) -> list[Sample]:
        samples: list[Sample] = []
        while len(samples) < count:
            number = consumed + len(samples)
            window = self.windows.window_of(number)
            held = self.windows.samples_of(window)
            rows = self._shuffled(window)[number - held.start :][: count - len(samples)]
            epoch = number // self.windows.num_rows
            samples += [Sample(entry, epoch) for entry in rows]
        return samples

    def _shuffle(self, window: int) -> list[RowEntry]:
        sequence = self.windows.sequence
        rows = [
            entry
            for position in sequence.window_positions(window)
            for entry in self.blocks[sequence.block_at(position)]
        ]
        order = seeded_order(len(rows), f"window {sequence.seed} {window}")
        return [rows[index] for index in order]
