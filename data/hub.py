"""Hub sets, streamed or fetched, and folders that `datasets` saved. Only data files are read; nothing of a set is executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.schema import SourceSection
from data import rows as blocks
from data.rows import Part, Row, listed

_SHUFFLE_BUFFER = 10_000


def is_local(source: SourceSection) -> bool:
    """Its path is a folder on this machine."""
    return source.path is not None and Path(source.path).is_dir()


def hub_parts(source: SourceSection, seed: int) -> Iterator[Part]:
    """Rows of a hub id or local folder, in order. seed spreads source.read rows over a streamed set.

    Raises FileNotFoundError if neither the set nor the hub is there.
    """
    if source.path is None:
        raise ValueError(
            f"data.sources {source.name!r} of kind datasets needs a path: a hub id or local folder"
        )
    import datasets  # seconds and 100 MB that only this kind of source pays

    saved = [
        Path(source.path) / source.dataset_split,
        Path(source.path),
    ]  # save_to_disk's two forms
    folder = next((str(p) for p in saved if (p / "state.json").is_file()), None)
    try:
        if folder is not None:
            yield from _table_parts(source, datasets.load_from_disk(folder))
            return
        rows = datasets.load_dataset(
            source.path,
            source.subset,
            split=source.dataset_split,
            revision=source.revision,
            streaming=source.streaming,
        )
        if isinstance(rows, datasets.IterableDataset):
            yield from _streamed_parts(source, rows, seed)
        else:
            yield from _table_parts(source, rows)
    except ConnectionError as error:
        raise FileNotFoundError(
            f"data.sources {source.name!r}: {source.path} is not here and the hub is out of reach; the same command "
            "goes on once it is back; for a machine without it fetch the set first (streaming: false)"
        ) from error


def _table_parts(source: SourceSection, table: Any) -> Iterator[Part]:
    """Of a datasets.Dataset, which is memory-mapped: any block without the others."""
    for first in range(0, len(table), blocks.BLOCK_ROWS):
        indices = range(first, min(first + blocks.BLOCK_ROWS, len(table)))
        yield Part(
            len(indices),
            lambda indices=indices: (
                Row(f"{source.path} row {i}", dict(table[i])) for i in indices
            ),
        )


def _streamed_parts(source: SourceSection, rows: Any, seed: int) -> Iterator[Part]:
    """Of a datasets.IterableDataset. A part of it is a sample spread over its files, not its head: sets are often sorted."""
    if source.read is not None:
        rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
    yield from listed(
        Row(f"{source.path} row {number}", dict(row)) for number, row in enumerate(rows)
    )
