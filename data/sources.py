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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import sha256_file
from configs.schema import SourceSection
from data import rows as blocks
from data.hub import hub_parts, is_local
from data.packages import PACKAGES_FOLDER
from data.recipes import read_fallback, read_recipe, read_tools, recipe_named
from data.rows import Part, Row, listed

_FILE_KINDS = ("jsonl", "json", "csv", "parquet")


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
    return source.kind == "datasets" and source.streaming and not is_local(source)


def count_rows(source: SourceSection) -> int | None:
    """Rows that will be read, for progress; None if only reading tells."""
    known = source.num_rows
    if source.kind == "parquet":
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


def _first(rows: Callable[[], Iterable[Row]], count: int) -> Callable[[], Iterable[Row]]:
    return lambda: itertools.islice(rows(), count)


def _parts(source: SourceSection, places: Places) -> Iterator[Part]:
    if source.kind == "packages":
        yield from listed(_package_rows(source, places))
    elif source.kind == "datasets":
        yield from hub_parts(source, places.seed)
    else:
        read = {"jsonl": _jsonl, "json": _json, "csv": _csv, "parquet": _parquet}[source.kind]
        for path in _files(source):
            yield from read(path)


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


def _jsonl(path: Path) -> Iterator[Part]:
    with _named(path), _opened(path) as file:
        lines = (
            Row(f"{path}:{number}", line)
            for number, line in enumerate(file, start=1)
            if line.strip()
        )
        yield from listed(lines)


def _json(path: Path) -> Iterator[Part]:
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
    yield from listed(
        Row(
            f"{path} row {number}", value if isinstance(value, dict) else json.dumps(value).encode()
        )
        for number, value in enumerate(values)
    )


def _csv(path: Path) -> Iterator[Part]:
    """First line: column names. Cells may hold line breaks and megabytes."""
    csv.field_size_limit(2**31 - 1)
    with _named(path), _opened(path) as file:
        text = (
            line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(file)
        )
        reader = csv.reader(text, strict=True)
        names = next(reader, [])
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{path} has two columns named {twice[0]!r}; rename one of them")
        yield from listed(
            Row(f"{path}:{reader.line_num}", _cells(names, row)) for row in reader if row
        )


def _cells(names: Sequence[str], row: Sequence[str]) -> dict[str, Any] | bytes:
    """Cells by column; of a row with more or fewer of them a text that says so, which is no row of columns."""
    if len(row) != len(names):
        problem = f"{len(row)} cells for {len(names)} columns; quote a cell that holds a comma"
        return json.dumps(problem).encode()
    return dict(zip(names, row, strict=True))


def _parquet(path: Path) -> Iterator[Part]:
    number = 0
    with _named(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(blocks.BLOCK_ROWS):
            yield Part(batch.num_rows, _batch_rows(path, number, batch))
            number += batch.num_rows


def _batch_rows(path: Path, first: int, batch: pa.RecordBatch) -> Callable[[], Iterable[Row]]:
    return lambda: (Row(f"{path} row {first + i}", row) for i, row in enumerate(batch.to_pylist()))
