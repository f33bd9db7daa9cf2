"""How the corpus is cut: shards of contiguous rows, and in a shard batches of similar length.

Both follow from the corpus alone, never from the number of workers: whoever extracts a shard does the same arithmetic on
the same batches and writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from data.corpus import CorpusRow

SMALL = 16
"""A batch of this part of batch_tokens may be padded: a forward of so few tokens takes the time to read the weights."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class ShardCut:
    """Where a feature shard lies in the corpus: rows start..stop-1."""

    index: int
    start: int
    stop: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class CorpusSlice:
    """The rows of one feature shard, in corpus order."""

    index: int
    rows: list[CorpusRow]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


def shard_tokens(shard_bytes: int, bytes_per_token: int) -> int:
    """Tokens of raw features that a shard holds at most, at least 1."""
    return max(1, shard_bytes // bytes_per_token)


def cut_lengths(lengths: Sequence[int], max_tokens: int) -> list[ShardCut]:
    """Contiguous shards of at most `max_tokens`, from the rows' token counts alone; a longer row is a shard of its own."""
    parts = _cut(range(len(lengths)), lambda position: lengths[position], max_tokens)
    return [
        ShardCut(index, part[0], part[-1] + 1, sum(lengths[part[0] : part[-1] + 1]))
        for index, part in enumerate(parts)
    ]


def cut_shards(rows: Iterable[CorpusRow], max_tokens: int) -> Iterator[CorpusSlice]:
    """The same cut of the rows themselves. One slice in memory at a time."""
    for index, part in enumerate(_cut(rows, lambda row: row.num_tokens, max_tokens)):
        yield CorpusSlice(index, part)


def length_batches(
    lengths: Sequence[int], batch_tokens: int, max_padding: float = 1.0
) -> list[list[int]]:
    """Indices into `lengths`, longest first, in batches of at most `batch_tokens` with padding.

    A row joins a batch while padding stays at most the share `max_padding` of it, or the batch is small; one longer than
    `batch_tokens` is a batch of its own. Longest first, so that memory runs out at once or not at all.
    """
    batches: list[list[int]] = []
    used = 0  # tokens of the last batch that are no padding
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = (len(batches[-1]) + 1) * lengths[batches[-1][0]] if batches else 0
        padding = padded - used - lengths[index]
        is_dense = padding <= max_padding * padded or padded * SMALL <= batch_tokens
        if batches and padded <= batch_tokens and is_dense:
            batches[-1].append(index)
            used += lengths[index]
        else:
            batches.append([index])
            used = lengths[index]
    return batches


def _cut(
    items: Iterable[_Item], num_tokens_of: Callable[[_Item], int], max_tokens: int
) -> Iterator[list[_Item]]:
    held: list[_Item] = []
    num_tokens = 0
    for item in items:
        if held and num_tokens + num_tokens_of(item) > max_tokens:
            yield held
            held, num_tokens = [], 0
        held.append(item)
        num_tokens += num_tokens_of(item)
    if held:
        yield held
