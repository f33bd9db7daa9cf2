"""Whole files by name, in a folder or in a bucket: what is shared between machines goes through here.

A name is relative, with `/` between its parts. An object is whole or absent: no reader ever sees half of one, whenever its
writer died. Nothing is ever changed in place, so equal writers (double work) never harm each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.files import fsync_path

_numbers = itertools.count()  # of files aside; with host and process no two writers meet


class Storage(ABC):
    """A folder or a bucket's prefix. Every method may be called from any thread.

    Raises FileNotFoundError where a name that must be there is not, and OSError in one line for what the disk or the
    service refuses once retries are used up.
    """

    url: str
    """As a user writes it."""

    def location(self, name: str) -> str:
        """`name` as messages give it."""
        return f"{self.url.rstrip('/')}/{name}"

    def names(self, prefix: str = "") -> list[str]:
        """Sorted; those that start with `prefix`, in sub-folders too."""
        return sorted(self.sizes(prefix))

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes by name, of all that `names` gives: one listing, however many there are."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes."""

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Seekable, for pyarrow; a read asks for its own range only. Not for several threads at once."""

    @abstractmethod
    def aside(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A path of this machine to write a large file to before it is `put`; removed at the end of the block."""

    @abstractmethod
    def put(self, name: str, path: Path) -> None:
        """The local file `path` becomes the object `name`, replacing one that is there. `path` may be gone then."""

    @abstractmethod
    def local_copy(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A path with the object's bytes for readers that need a real file: the file itself in a folder, else a
        temporary copy that goes with the block."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """As `put`, for small objects."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Write if the name is free: of any number of creators, on any machines, one gets True.

        `data` should name its creator: a bucket whose answer was lost on the way is asked whose bytes are there.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Done as well if there is none."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Drop what writers that died left aside. Never disturbs one that is at work."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Of a local storage; None for a bucket."""


def open_storage(location: str | Path) -> Storage:
    """A folder (which need not exist yet), or `s3://bucket/prefix`, or `gs://bucket/prefix`.

    Raises ValueError for another scheme, or if what a bucket needs is not installed.
    """
    scheme, separator, _ = str(location).partition("://")
    if not separator:
        return LocalStorage(Path(location))
    if scheme not in ("s3", "gs"):
        raise ValueError(f"{location}: no storage `{scheme}://`; use a path, s3://... or gs://...")
    try:
        from common.object_storage import ObjectStorage  # an optional package
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{location}: buckets need the package `{error.name}`; install it with "
            "`.venv/bin/pip install -c constraints.txt -e '.[s3]'`, or use a path"
        ) from error
    return ObjectStorage(str(location))


class LocalStorage(Storage):
    """A folder, on a disk or shared between machines (NFS, Lustre: hard links and renames must be atomic there)."""

    def __init__(self, folder: Path):
        self.url, self._folder = str(folder), folder

    @property
    def folder(self) -> Path:
        return self._folder

    def sizes(self, prefix: str = "") -> dict[str, int]:
        start = self._folder / prefix.rpartition("/")[0]
        return {name: size for name, size in self._walk(start) if name.startswith(prefix)}

    def _walk(self, folder: Path) -> Iterator[tuple[str, int]]:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as found,
        ):
            for entry in found:
                if entry.name.startswith("."):  # aside
                    continue
                if entry.is_dir():
                    yield from self._walk(Path(entry.path))
                else:
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                        path = Path(entry.path)
                        yield path.relative_to(self._folder).as_posix(), entry.stat().st_size

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return (self._folder / name).open("rb")

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[Path]:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = f"{socket.gethostname()}~{os.getpid()}~{next(_numbers)}"
        aside = path.with_name(f".{path.name}~{writer}.tmp")
        try:
            yield aside
        finally:
            aside.unlink(missing_ok=True)

    def put(self, name: str, path: Path) -> None:
        target = self._folder / name
        if path.parent == target.parent:
            _place(path, target)
            return
        with self.aside(name) as aside:  # it may come from another disk
            shutil.copyfile(path, aside)
            _place(aside, target)

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        self.size(name)
        yield self._folder / name

    def write(self, name: str, data: bytes) -> None:
        with self.aside(name) as aside:
            aside.write_bytes(data)
            _place(aside, self._folder / name)

    def create(self, name: str, data: bytes) -> bool:
        with self.aside(name) as aside:
            aside.write_bytes(data)
            fsync_path(aside)
            try:
                # a link never replaces, and is there at once with all its bytes
                (self._folder / name).hardlink_to(aside)
            except FileExistsError:
                return False
            fsync_path(aside.parent)
        return True

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Those of this machine's dead processes: of another machine's it cannot be known here whether they live."""
        for aside in self._folder.rglob(".*~*.tmp"):
            _, host, pid, *_ = aside.name.split("~")
            if host == socket.gethostname() and not _is_alive(int(pid)):
                aside.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _place(aside: Path, target: Path) -> None:
    """Whole on disk before it has its name."""
    fsync_path(aside)
    aside.replace(target)
    fsync_path(target.parent)
