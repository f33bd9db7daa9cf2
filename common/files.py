"""Files that are whole or absent: written aside, fsynced, renamed. Sums and JSON with one spelling."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from common.waiting import Waiting


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to; it takes `path`'s place, on disk, when the block ends well.

    The name carries the process id, so that two writers of the same bytes never meet. An existing folder is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(aside)
    try:
        yield aside
        for file in sorted(aside.rglob("*")) if aside.is_dir() else [aside]:
            fsync_path(file)
        if aside.is_dir():
            fsync_path(aside)
            if path.is_dir():
                old = path.with_name(f".{path.name}.{os.getpid()}.old")
                path.rename(old)
                aside.rename(path)
                shutil.rmtree(old)
            else:
                aside.rename(path)
        else:
            aside.replace(path)
        fsync_path(path.parent)
    finally:
        _remove(aside)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left aside in `folder`. Call before any writer of this run starts.

    A folder that was being replaced, and has neither version under its name, gets the old one back.
    """
    for old in folder.glob(".*.old"):
        replaced = folder / old.name[1:].rsplit(".", 2)[0]
        if not replaced.exists():
            old.rename(replaced)
    for leftover in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        _remove(leftover)


@contextlib.contextmanager
def only_writer(lock: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, for a stage whose double work would not be harmless. The lock goes with its process.

    `patience_s`: how long one that holds it may take to end, as a rank does whose launcher was just killed.
    Raises ValueError if another process holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        waiting = Waiting()
        while not _locked(file):
            if waiting.elapsed_s >= patience_s:
                raise ValueError(
                    f"another process holds {lock}; wait for it, stop it, or choose another run.output_dir"
                )
            waiting.pause(lambda: f"waiting for the process that holds {lock}")
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, value: Any) -> None:
    """Atomic, keys in the given order, one trailing newline: equal values give equal bytes."""
    with atomic_path(path) as aside:
        aside.write_text(json_text(value), encoding="utf-8")


def json_text(value: Any) -> str:
    """The one spelling of a JSON file."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def read_json(path: Path, remedy: str) -> Any:
    """Raises FileNotFoundError or ValueError in one line that ends with `remedy`."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    if not path.is_file():  # a pipe or a device would be read for ever
        raise ValueError(f"{path} is no file; {remedy}")
    return parse_json(path.read_bytes(), path, remedy)


def parse_json(data: bytes, path: Path | str, remedy: str) -> Any:
    """The value of a file's bytes; `path` names it. Raises ValueError in one line that ends with `remedy`."""
    try:
        return json.loads(data.decode("utf-8"))
    except ValueError as error:  # no UTF-8, no JSON, or an integer of thousands of digits
        raise ValueError(f"{path} is not valid JSON; {remedy}") from error


@contextlib.contextmanager
def fields_of(path: Path | str, remedy: str) -> Iterator[None]:
    """For the lines that take a JSON file's value apart: what they miss or find of another kind is one line, a ValueError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} does not hold what it should ({error}); {remedy}") from error


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
