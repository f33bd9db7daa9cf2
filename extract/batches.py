"""How the corpus is cut: shards of contiguous rows, and in a shard batches of similar length.

Both follow from the corpus alone, never from the number of ranks: whoever extracts a shard does the same arithmetic on
the same batches and writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from data.corpus import CorpusRow


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


def cut_shards(rows: Iterable[CorpusRow], max_tokens: int) -> Iterator[CorpusSlice]:
    """Contiguous slices of at most `max_tokens`; a longer row is a slice of its own. One slice in memory at a time."""
    index, held, num_tokens = 0, [], 0
    for row in rows:
        if held and num_tokens + row.num_tokens > max_tokens:
            yield CorpusSlice(index, held)
            index, held, num_tokens = index + 1, [], 0
        held.append(row)
        num_tokens += row.num_tokens
    if held:
        yield CorpusSlice(index, held)


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices into `lengths`, longest first, in batches of at most `batch_tokens` with padding.

    A row longer than that is a batch of its own. Longest first, so that memory runs out at once or not at all.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
