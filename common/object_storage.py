"""Storage in a bucket, `s3://` or `gs://`, by obstore: one wheel without dependencies, requests in Rust.

It was chosen over fsspec with s3fs and gcsfs, which bring some twenty packages, one client a cloud, no conditional create
and another event loop beside torch's workers. Credentials, region and endpoint come from the environment (docs/streaming.md).
Server errors (5xx), refused and dropped connections are retried with exponential back-off and jitter.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import GCSStore, S3Store

from common.storage import Storage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore.store import ClientConfig, RetryConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 16 * 2**20
MAX_PARTS = 9_000  # S3 allows 10,000
PARALLEL_PARTS = 8
READ_AHEAD_BYTES = 2**16  # a Parquet footer of a shard of some hundred rows
RETRIES: RetryConfig = {
    "max_retries": 10,
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
    # requests are signed once: S3 refuses signatures that are older than 15 minutes
    "retry_timeout": timedelta(minutes=3),
}
TRIES = 3  # of our own, for what the client does not repeat: an answer that breaks off in its body


class ObjectStorage(Storage):
    """A bucket's prefix. Writes are conditional or whole: S3 and GCS show an object once its last part is there."""

    def __init__(self, url: str):
        """url: `s3://bucket/prefix` or `gs://bucket/prefix`. No request is made."""
        self.url = url.rstrip("/")
        scheme, _, rest = self.url.partition("://")
        bucket, _, prefix = rest.partition("/")
        options = {"prefix": prefix or None, "retry_config": RETRIES}
        if scheme == "s3":
            client: ClientConfig = {"allow_http": _endpoint().startswith("http://")}
            self._store = S3Store(bucket, client_options=client, **options)
        else:
            self._store = GCSStore(bucket, **options)

    @property
    def folder(self) -> None:
        return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        # a bucket lists by whole parts of names
        parent = prefix.rpartition("/")[0]

        def listed() -> dict[str, int]:
            batches = obstore.list(self._store, prefix=parent or None, chunk_size=1000)
            return {
                meta["path"]: meta["size"]
                for batch in batches
                for meta in batch
                if meta["path"].startswith(prefix)
            }

        return self._tried("", listed)

    def size(self, name: str) -> int:
        return self._tried(name, lambda: obstore.head(self._store, name)["size"])

    def read(self, name: str) -> bytes:
        return self._tried(name, lambda: bytes(obstore.get(self._store, name).bytes()))

    def read_range(self, name: str, start: int, length: int) -> bytes:
        return self._tried(
            name,
            lambda: bytes(obstore.get_range(self._store, name, start=start, length=length)),
        )

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _RangeFile(self, name, self.size(name)))

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
            yield Path(folder) / Path(name).name

    def put(self, name: str, path: Path) -> None:
        part = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
        self._tried(
            name,
            lambda: obstore.put(
                self._store, name, path, chunk_size=part, max_concurrency=PARALLEL_PARTS
            ),
        )

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        size = self.size(name)
        starts = range(0, size, PART_BYTES)
        with self.aside(name) as path:
            with path.open("wb") as file, ThreadPoolExecutor(PARALLEL_PARTS) as pool:
                for first in range(0, len(starts), PARALLEL_PARTS):  # no more than these in memory
                    parts = starts[first : first + PARALLEL_PARTS]
                    for part in pool.map(lambda start: self._part(name, start, size), parts):
                        file.write(part)
            yield path

    def _part(self, name: str, start: int, size: int) -> bytes:
        return self.read_range(name, start, min(PART_BYTES, size - start))

    def write(self, name: str, data: bytes) -> None:
        self._tried(name, lambda: obstore.put(self._store, name, data, use_multipart=False))

    def create(self, name: str, data: bytes) -> bool:
        def created() -> bool:
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # perhaps by this very call, whose answer was lost and which was repeated
                try:
                    return self.read(name) == data
                except FileNotFoundError:  # and gone again
                    return False
            return True

        return self._tried(name, created)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._tried(name, lambda: obstore.delete(self._store, name))

    def remove_leftovers(self) -> None:
        """Nothing: an upload that never ended is no object; a bucket rule removes its parts (docs/streaming.md)."""

    def _tried(self, name: str, request: Callable[[], T]) -> T:
        """`request`, again after a pause if the service or the way to it failed."""
        for attempt in range(TRIES):
            try:
                return request()
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{self.location(name)} does not exist, or its bucket does not"
                ) from error
            except BaseError as error:
                if not isinstance(error, GenericError) or attempt == TRIES - 1:
                    raise OSError(f"{self.location(name)}: {_first_line(error)}") from error
                logger.warning("%s: %s; trying again", self.location(name), _first_line(error))
                time.sleep(0.5 * 2**attempt)
        raise AssertionError


class _RangeFile(io.RawIOBase):
    """An object as a file: every read is a request for its range, but for the end, which is kept."""

    def __init__(self, storage: ObjectStorage, name: str, size: int):
        super().__init__()
        self.storage, self.object_name, self.size = storage, name, size
        self.position = 0
        self.tail_start = max(0, size - READ_AHEAD_BYTES)
        self.tail: bytes | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = origin + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        start = self.position
        end = self.size if size is None or size < 0 else min(self.size, start + size)
        if start >= end:
            return b""
        self.position = end
        if start < self.tail_start:
            return self.storage.read_range(self.object_name, start, end - start)
        if self.tail is None:
            length = self.size - self.tail_start
            self.tail = self.storage.read_range(self.object_name, self.tail_start, length)
        return self.tail[start - self.tail_start : end - self.tail_start]

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)


def _endpoint() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if name in os.environ), "")


def _first_line(error: Exception) -> str:
    """obstore adds its own data structures on further lines."""
    return str(error).strip().partition("\n")[0]
