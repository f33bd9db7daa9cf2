"""prompts.jsonl beside report.json: what every prompt did, a line a prompt, acceptor, mode and temperature.

With it two drafters are compared prompt by prompt (evaluation/compare.py). report.json carries its sha256, so that the two
files are known to belong together. Imports no torch: a comparison answers at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import atomic_path, fields_of
from evaluation.acceptance import PromptPasses

ALL_TASKS = "all"
"""The task of rows over all prompts."""
FILE = "prompts.jsonl"
REMEDY = "write it again with `./launch.sh report`"


@dataclass(frozen=True)
class Kind:
    """How prompts were decoded; fields as in report.json's rows."""

    mode: str
    temperature: float | None
    acceptor: str
    budget: int | None

    @property
    def is_plain(self) -> bool:
        """The target alone: nothing is drafted."""
        return self.acceptor == "plain"


@dataclass(frozen=True)
class PromptRecord:
    """One prompt decoded by one acceptor; fields as in report.json's rows."""

    mode: str
    temperature: float | None
    acceptor: str
    budget: int | None
    prompt_id: str
    task: str
    passes: list[int]
    """Emitted tokens a pass."""
    child_ranks: list[list[int]]
    """A list a pass: which choices of the drafter the emitted draft tokens were, 0 the first."""

    @property
    def kind(self) -> Kind:
        return Kind(self.mode, self.temperature, self.acceptor, self.budget)

    @property
    def as_passes(self) -> PromptPasses:
        return PromptPasses(self.prompt_id, self.task, tuple(self.passes))


def by_kind(records: Iterable[PromptRecord]) -> dict[Kind, list[PromptRecord]]:
    """In the order of first appearance."""
    found: dict[Kind, list[PromptRecord]] = {}
    for record in records:
        found.setdefault(record.kind, []).append(record)
    return found


def write_prompt_records(folder: Path, records: Iterable[PromptRecord]) -> dict[str, Any]:
    """Writes `prompts.jsonl`; returns its name and sum for report.json."""
    digest = hashlib.sha256()
    with atomic_path(folder / FILE) as aside, aside.open("wb") as file:
        for record in records:
            line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":"))
            data = line.encode() + b"\n"
            digest.update(data)
            file.write(data)
    return {"file": FILE, "sha256": digest.hexdigest()}


def read_prompt_records(folder: Path, entry: dict[str, Any]) -> list[PromptRecord]:
    """`entry` is report.json's. Raises FileNotFoundError or ValueError in one line if the file is not the report's."""
    path = folder / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {REMEDY}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path} is not the one that report.json was written with; {REMEDY}")
    with fields_of(path, REMEDY):
        records = [PromptRecord(**json.loads(line)) for line in data.splitlines()]
        for record in records:
            if not isinstance(record.passes, list) or not all(
                type(n) is int for n in record.passes
            ):
                raise TypeError(f"passes of prompt {record.prompt_id}")
        return records
