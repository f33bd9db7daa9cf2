"""The order in which features are streamed: a function of corpus, recipe and seed, so that both sides know it without a word.

The training rows, in corpus order, are cut into blocks as feature shards are cut. Every epoch takes all blocks in a seeded
order of its own. A *position* counts blocks over the epochs laid end to end; *windows* of W positions, the last of an epoch
shorter, are what rows are shuffled in (train/order.py), so a window is needed as a whole.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class BlockSequence:
    num_blocks: int
    window: int
    """W, blocks."""
    seed: int

    @property
    def windows_an_epoch(self) -> int:
        return -(-self.num_blocks // self.window)

    def block_at(self, position: int) -> int:
        epoch, place = divmod(position, self.num_blocks)
        return self.epoch_order(epoch)[place]

    def epoch_order(self, epoch: int) -> tuple[int, ...]:
        return seeded_order(self.num_blocks, f"blocks {self.seed} {epoch}")

    def window_positions(self, window: int) -> range:
        """Of the `window`-th window, counted over the epochs."""
        epoch, place = divmod(window, self.windows_an_epoch)
        first = place * self.window
        last = min(first + self.window, self.num_blocks)
        return range(epoch * self.num_blocks + first, epoch * self.num_blocks + last)

    def distinct_blocks(self, positions: range) -> Iterator[int]:
        """The blocks at `positions`, each once, where it comes first."""
        seen: set[int] = set()
        for position in positions:
            if len(seen) == self.num_blocks:
                return
            block = self.block_at(position)
            if block not in seen:
                seen.add(block)
                yield block


class SampleWindows:
    """Where the samples of the endless sequence are: sample number n is the n-th of all rows of all epochs."""

    def __init__(self, sequence: BlockSequence, rows_of_block: Sequence[int]):
        assert len(rows_of_block) == sequence.num_blocks
        self.sequence, self.rows_of_block = sequence, rows_of_block
        self.num_rows = sum(rows_of_block)
        self._ends = lru_cache(maxsize=4)(self._make_ends)

    def window_of(self, number: int) -> int:
        """The window, counted over the epochs, that sample `number` is in."""
        epoch, index = divmod(number, self.num_rows)
        return epoch * self.sequence.windows_an_epoch + bisect_right(self._ends(epoch), index)

    def samples_of(self, window: int) -> range:
        """Numbers of the samples of a window."""
        epoch, place = divmod(window, self.sequence.windows_an_epoch)
        ends, first = self._ends(epoch), epoch * self.num_rows
        return range(first + (ends[place - 1] if place else 0), first + ends[place])

    def positions(self, first: int, count: int) -> range:
        """Of all blocks that the windows of `count` samples from number `first` are made of."""
        start = self.sequence.window_positions(self.window_of(first)).start
        stop = self.sequence.window_positions(self.window_of(first + count - 1)).stop
        return range(start, stop)

    def _make_ends(self, epoch: int) -> list[int]:
        ends, end = [], 0
        for place in range(self.sequence.windows_an_epoch):
            window = epoch * self.sequence.windows_an_epoch + place
            for position in self.sequence.window_positions(window):
                end += self.rows_of_block[self.sequence.block_at(position)]
            ends.append(end)
        return ends


@lru_cache(maxsize=8)
def seeded_order(count: int, name: str) -> tuple[int, ...]:
    """A permutation of `count` that depends on `name` alone."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return tuple(torch.randperm(count, generator=generator).tolist())
