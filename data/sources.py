"""Sources as blocks of rows: files, hub sets and packages, in an order that nothing but the source decides.

A block is parsed only when somebody asks for its rows, so ranks that share a source, and runs that continue one, pass over
the others' blocks at the speed of the disk. Nothing of a data set is executed: hub sets are read as the data files they hold.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import sha256_file
from configs.schema import SourceSection
from data.packages import PACKAGES_FOLDER
from data.recipes import read_fallback, read_recipe, read_tools, recipe_named

BLOCK_ROWS = 2048
_SHUFFLE_BUFFER = 10_000
_FILE_KINDS = ("jsonl", "json", "csv", "parquet")


@dataclass(frozen=True)
class Row:
    where: str
    """File and row, for messages to the user."""
    value: bytes | dict[str, Any]
    """A line of JSON that is not parsed yet, or the row's columns."""
    license: str | None = None
    """If the source states one itself."""


@dataclass(frozen=True)
class Block:
    number: int
    num_rows: int
    rows: Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Places:
    """What reading depends on besides the source."""

    seed: int = 0
    """Spreads `read` rows over a streamed set."""
    offline: bool = False
    """Recipes of kind packages come from the file that the repository carries, not from wheels."""
    packages_folder: Path = PACKAGES_FOLDER


def read_blocks(source: SourceSection, places: Places) -> Iterator[Block]:
    """The source's rows, at most `source.read`, in blocks of at most BLOCK_ROWS that never span two files.

    Raises FileNotFoundError if there is nothing at its path, ValueError if a file is not of the stated kind.
    """
    left = source.read
    for number, part in enumerate(_parts(source, places)):
        if left is None:
            yield Block(number, part.num_rows, part.rows)
            continue
        count = min(left, part.num_rows)
        if count == 0:
            return
        yield Block(number, count, _first(part.rows, count))
        left -= count


def is_streamed(source: SourceSection) -> bool:
    """Rows arrive one after the other over a network: ranks share such sources whole, not by blocks."""
    return source.kind == "datasets" and source.streaming and not _is_local(source)


def count_rows(source: SourceSection, places: Places) -> int | None:
    """Rows that will be read, for progress; None if only reading tells."""
    known = source.num_rows
    if source.kind == "packages":
        known = sum(1 for _ in _package_rows(source, places))
    elif source.kind == "parquet":
        known = sum(_named_call(pq.read_metadata, path).num_rows for path in _files(source))
    elif source.kind == "jsonl":
        known = sum(_count_lines(path) for path in _files(source))
    return known if known is None or source.read is None else min(known, source.read)


def source_identity(source: SourceSection) -> list[str]:
    """What the source's content is, host-independent: name and sum of each file, the pinned package, or id and revision."""
    if source.kind in _FILE_KINDS:
        return [f"{path.name}:{sha256_file(path)}" for path in _files(source)]
    if source.kind == "packages":
        return [recipe_named(source.path).package.requirement]
    return [f"{source.path}@{source.revision}"]


@dataclass(frozen=True)
class _Part:
    num_rows: int
    rows: Callable[[], Iterable[Row]]


def _first(rows: Callable[[], Iterable[Row]], count: int) -> Callable[[], Iterable[Row]]:
    return lambda: itertools.islice(rows(), count)


def _parts(source: SourceSection, places: Places) -> Iterator[_Part]:
    if source.kind == "packages":
        yield from _listed(_package_rows(source, places))
    elif source.kind == "datasets":
        yield from _dataset_parts(source, places)
    else:
        read = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet}[source.kind]
        for path in _files(source):
            yield from read(path)


def _listed(rows: Iterator[Row]) -> Iterator[_Part]:
    while block := list(itertools.islice(rows, BLOCK_ROWS)):
        yield _Part(len(block), lambda block=block: block)


def _package_rows(source: SourceSection, places: Places) -> Iterator[Row]:
    recipe = recipe_named(source.path)
    name = source.path or ""
    rows = read_fallback(name) if places.offline else read_recipe(name, places.packages_folder)
    tools = {} if places.offline else read_tools(name, places.packages_folder)
    for row, messages in rows:
        columns = {"messages": messages, "group": row.partition("/")[0], "tools": tools.get(row)}
        yield Row(f"{recipe.package.requirement} {row}", columns, recipe.license)


def _files(source: SourceSection) -> list[Path]:
    """Files of a path, folder or glob, sorted by name."""
    if source.path is None:
        raise ValueError(
            f"data.sources {source.name!r} of kind {source.kind} needs a path: a file, folder or glob"
        )
    path = Path(source.path)
    if path.is_file():
        return [path]
    if path.is_dir():
        ends = (f".{source.kind}", f".{source.kind}.gz")
        found = sorted(p for p in path.rglob("*") if p.name.endswith(ends))
    else:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        found = sorted(anchor.glob(str(path.relative_to(path.anchor))))
    if not found:
        raise FileNotFoundError(
            f"data.sources {source.name!r}: no {source.kind} file at {source.path}; correct its path"
        )
    return found


def _opened(path: Path) -> IO[bytes]:
    # the caller closes it
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115
    return opened  # pyright: ignore[reportReturnType] - GzipFile reads bytes as every binary file


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """The readers do not say which file they cannot read."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; fetch it again or correct the path"
        ) from error


def _named_call(read: Callable[[Path], Any], path: Path) -> Any:
    with _named(path):
        return read(path)


def _count_lines(path: Path) -> int:
    with _named(path), _opened(path) as file:
        return sum(1 for line in file if line.strip())


def _jsonl(path: Path) -> Iterator[_Part]:
    with _named(path), _opened(path) as file:
        lines = (
            Row(f"{path}:{number}", line)
            for number, line in enumerate(file, start=1)
            if line.strip()
        )
        yield from _listed(lines)


def _json(path: Path) -> Iterator[_Part]:
    """A file that is one list of objects; it is held in memory whole."""
    with _named(path), _opened(path) as file:
        text = file.read()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); one object a line is kind jsonl"
        ) from error
    if not isinstance(values, list):
        raise ValueError(
            f"{path}: expected a list of JSON objects, found {type(values).__name__}; put the rows in a list"
        )
    yield from _listed(
        Row(
            f"{path} row {number}", value if isinstance(value, dict) else json.dumps(value).encode()
        )
        for number, value in enumerate(values)
    )


def _csv(path: Path) -> Iterator[_Part]:
    """First line: column names. Cells may hold line breaks and megabytes."""
    csv.field_size_limit(2**31 - 1)
    with _named(path), _opened(path) as file:
        text = (
            line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(file)
        )
        reader = csv.DictReader(text, strict=True)
        yield from _listed(
            Row(f"{path}:{reader.line_num}", {str(k): v for k, v in row.items()}) for row in reader
        )


def _parquet(path: Path) -> Iterator[_Part]:
    number = 0
    with _named(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BLOCK_ROWS):
            yield _Part(batch.num_rows, _batch_rows(path, number, batch))
            number += batch.num_rows


def _batch_rows(path: Path, first: int, batch: pa.RecordBatch) -> Callable[[], Iterable[Row]]:
    return lambda: (Row(f"{path} row {first + i}", row) for i, row in enumerate(batch.to_pylist()))


def _is_local(source: SourceSection) -> bool:
    return source.path is not None and Path(source.path).is_dir()


def _dataset_parts(source: SourceSection, places: Places) -> Iterator[_Part]:
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
            yield from _streamed_parts(source, rows, places.seed)
        else:
            yield from _table_parts(source, rows)
    except ConnectionError as error:
        raise FileNotFoundError(
            f"data.sources {source.name!r}: {source.path} is not here and the hub is out of reach; the same command "
            "goes on once it is back; for a machine without it fetch the set first (streaming: false)"
        ) from error


def _table_parts(source: SourceSection, table: Any) -> Iterator[_Part]:
    """Of a datasets.Dataset, which is memory-mapped: any block without the others."""
    for first in range(0, len(table), BLOCK_ROWS):
        indices = range(first, min(first + BLOCK_ROWS, len(table)))
        yield _Part(
            len(indices),
            lambda indices=indices: (
                Row(f"{source.path} row {i}", dict(table[i])) for i in indices
            ),
        )


def _streamed_parts(source: SourceSection, rows: Any, seed: int) -> Iterator[_Part]:
    """Of a datasets.IterableDataset. A part of it is a sample spread over its files, not its head: sets are often sorted."""
    if source.read is not None:
        rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
    yield from _listed(
        Row(f"{source.path} row {number}", dict(row)) for number, row in enumerate(rows)
    )
