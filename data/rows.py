"""A row of a source and the blocks that rows come in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_ROWS = 2048
"""What is read, judged and kept at once; the grain that ranks share and kills lose."""


@dataclass(frozen=True)
class Row:
    where: str
    """File and row, for messages to the user."""
    value: bytes | dict[str, Any]
    """A line of JSON that is not parsed yet, or the row's columns."""
    license: str | None = None
    """If the source states one itself."""


@dataclass(frozen=True)
class Part:
    """Neighbouring rows, parsed only when asked for."""

    num_rows: int
    rows: Callable[[], Iterable[Row]]


def listed(rows: Iterator[Row]) -> Iterator[Part]:
    """Rows that come one by one, BLOCK_ROWS at a time."""
    while block := list(itertools.islice(rows, BLOCK_ROWS)):
        yield Part(len(block), lambda block=block: block)
