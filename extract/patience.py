"""A storage that tries again: a network file system answers late, stale or not at all for a moment, and a week's work goes on.

What trying again cannot mend (a full or read-only disk, a missing file, no permission) is raised at once. Buckets have their own
retries below this (common/object_storage.py); a call that failed in them to the end is tried again all the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from common.storage import Storage

logger = logging.getLogger(__name__)

WAITS_S = (0.1, 0.5, 2.0, 8.0)  # between tries
_FINAL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EFBIG, errno.EINVAL}
_FINAL_KINDS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

_Value = TypeVar("_Value")


class PatientStorage(Storage):
    """Every call of `inner`, tried up to five times."""

    def __init__(self, inner: Storage, sleep: Callable[[float], None] = time.sleep):
        self.inner, self.url, self._sleep = inner, inner.url, sleep

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self._try(lambda: self.inner.sizes(prefix))

    def size(self, name: str) -> int:
        return self._try(lambda: self.inner.size(name))

    def read(self, name: str) -> bytes:
        return self._try(lambda: self.inner.read(name))

    def open(self, name: str) -> BinaryIO:
        return self._try(lambda: self.inner.open(name))

    def aside(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return self.inner.aside(name)

    def put(self, name: str, path: Path) -> None:
        """A try that failed on its way back may have moved the file to where it belongs."""
        num_bytes = path.stat().st_size

        def put() -> None:
            if path.exists() or self.inner.size(name) != num_bytes:
                self.inner.put(name, path)

        self._try(put)

    def local_copy(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return self.inner.local_copy(name)

    def write(self, name: str, data: bytes) -> None:
        self._try(lambda: self.inner.write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        """A try that failed on its way back may have created the name: then it holds this creator's bytes."""
        num_tries = 0

        def create() -> bool:
            nonlocal num_tries
            num_tries += 1
            created = self.inner.create(name, data)
            return created or (num_tries > 1 and self.inner.read(name) == data)

        return self._try(create)

    def delete(self, name: str) -> None:
        self._try(lambda: self.inner.delete(name))

    def remove_leftovers(self) -> None:
        self._try(self.inner.remove_leftovers)

    @property
    def folder(self) -> Path | None:
        return self.inner.folder

    def _try(self, call: Callable[[], _Value]) -> _Value:
        for wait_s in WAITS_S:
            try:
                return call()
            except OSError as error:
                if isinstance(error, _FINAL_KINDS) or error.errno in _FINAL:
                    raise
                logger.warning("%s: %s; trying again in %.1f s", self.url, error, wait_s)
                self._sleep(wait_s)
        return call()
