"""A file that only grows: one JSON entry a line, each with its checksum, on disk within a second of being written.

    3f1c09ab {"place":17,"turn":0,"ids":[...],"finished":true}

A process that is killed loses nothing it had written; a machine that loses power loses at most the last second, and leaves
a torn tail that the next start cuts off. Damage anywhere else is an error, never skipped.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SYNC_EVERY_S = 1.0


@dataclass(frozen=True)
class Entry:
    offset: int
    """Of its line in the file, for `Journal.read`."""
    value: dict[str, Any]


class Journal:
    """Open for appending; the first line says whose it is. One process at a time (hold `common.files.only_writer`)."""

    def __init__(self, path: Path, fingerprint: str):
        """Creates the file, or cuts its torn tail. Raises ValueError if it is damaged or of another fingerprint."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = _cut_torn_tail(path, self._file)
        self._last_sync = time.monotonic()
        if self._end == 0:
            self.append({"fingerprint": fingerprint})
            self.sync()
            _sync_folder(path.parent)
        elif (found := self.read(0).get("fingerprint")) != fingerprint:
            raise ValueError(
                f"{path} holds answers of another plan ({found}); remove it to begin anew"
            )

    def append(self, value: dict[str, Any]) -> int:
        """Write one entry; its offset."""
        line = _line_of(value)
        offset = self._end
        written = os.pwrite(self._file, line, offset)
        if written != len(line):  # a full disk writes a part before it says so
            raise OSError(f"{self._path}: only {written} of {len(line)} bytes could be written")
        self._end += written
        if time.monotonic() - self._last_sync >= _SYNC_EVERY_S:
            self.sync()
        return offset

    def entries(self) -> Iterator[Entry]:
        """Every entry but the first line, in the order written."""
        with self._path.open("rb") as file:
            offset = len(file.readline())
            for line in file:
                yield Entry(offset, _value_of(line))
                offset += len(line)

    def read(self, offset: int) -> dict[str, Any]:
        with self._path.open("rb") as file:
            file.seek(offset)
            return _value_of(file.readline())

    def sync(self) -> None:
        os.fdatasync(self._file)
        self._last_sync = time.monotonic()

    def close(self) -> None:
        self.sync()
        os.close(self._file)


def _cut_torn_tail(path: Path, file: int) -> int:
    """The length of what is whole. Raises ValueError if a good line follows a bad one: that is no torn tail."""
    whole, torn, number = 0, 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            is_good = _is_good(line)
            if is_good and torn:
                raise ValueError(
                    f"{path}: line {torn} is damaged; restore the file, or remove it and lose the answers it holds"
                )
            if is_good:
                whole += len(line)
            elif not torn:
                torn = number
    if torn:
        logger.warning("%s: a torn tail of %d lines is cut off", path, number - torn + 1)
        os.ftruncate(file, whole)
    return whole


def _line_of(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _is_good(line: bytes) -> bool:
    return line.endswith(b"\n") and line[:9] == b"%08x " % zlib.crc32(line[9:-1])


def _value_of(line: bytes) -> dict[str, Any]:
    assert _is_good(line), "checked when it was opened"
    return json.loads(line[9:])


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
