"""Finished prompts on disk: a small JSON each, so that a stopped evaluation continues and ranks share the work.

The folder's name is the fingerprint of everything a record depends on (drafter, target, features, settings): records of
another drafter or setting are never taken for this one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.distributed import Ranks
from common.files import fields_of, read_json, write_json
from common.progress import Progress
from data.features import RowEntry
from evaluation.drawing import DrawnTree
from evaluation.live import Difference, LiveDecode, LiveRecord
from evaluation.parity import DifferingPass, Parity
from evaluation.replay import RowReplay
from evaluation.sums import ReplaySums

Record = TypeVar("Record")

RECORD_FORMAT = 4
"""Part of the folder's fingerprint, so that records of another layout or meaning are never read."""


@dataclass(frozen=True)
class RecordKind:
    """`live`, `replay` or `lossless`: part of the file name, and shown with the progress."""

    name: str
    folder: Path

    def path(self, entry: RowEntry) -> Path:
        return self.folder / f"{self.name}-{entry.sample_id}.json"

    def read(self, entry: RowEntry, parse: Callable[[dict[str, Any]], Record]) -> Record:
        """Raises FileNotFoundError or ValueError in one line if the record is missing or broken."""
        path = self.path(entry)
        remedy = "remove it if it is there and run `./launch.sh evaluate` again"
        value = read_json(path, remedy)
        with fields_of(path, remedy):
            return parse(value)


def make_missing(
    kind: RecordKind,
    entries: Sequence[RowEntry],
    ranks: Ranks,
    make: Callable[[Sequence[RowEntry]], Sequence[dict[str, Any]]],
    group_size: int = 1,
) -> None:
    """This rank's share (every world_size-th entry) of the records that are not there yet, written group by group."""
    mine = entries[ranks.rank :: ranks.world_size]
    missing = [entry for entry in mine if not kind.path(entry).is_file()]
    progress = Progress(f"{kind.name} evaluation", len(mine), "prompts", len(mine) - len(missing))
    for start in range(0, len(missing), group_size):
        group = missing[start : start + group_size]
        for entry, record in zip(group, make(group), strict=True):
            write_json(kind.path(entry), record)
            progress.advance()
    progress.finish()


def read_all(
    kind: RecordKind, entries: Sequence[RowEntry], parse: Callable[[dict[str, Any]], Record]
) -> Iterator[Record]:
    return (kind.read(entry, parse) for entry in entries)


def replay_to_json(replayed: RowReplay) -> dict[str, Any]:
    return {
        "prompt_id": replayed.prompt_id,
        "task": replayed.task,
        "passes": replayed.passes,
        "child_ranks": replayed.child_ranks,
        "sums": replayed.sums.to_json(),
        "unfitted": None if replayed.unfitted is None else replayed.unfitted.to_json(),
    }


def replay_from_json(value: dict[str, Any]) -> RowReplay:
    unfitted = value["unfitted"]
    return RowReplay(
        value["prompt_id"],
        value["task"],
        value["passes"],
        value["child_ranks"],
        ReplaySums.from_json(value["sums"]),
        None if unfitted is None else ReplaySums.from_json(unfitted),
    )


def live_to_json(record: LiveRecord) -> dict[str, Any]:
    return asdict(record)


def live_from_json(value: dict[str, Any]) -> LiveRecord:
    parity = value["parity"]
    differing = [DifferingPass(**item) for item in parity["differing"]]
    return LiveRecord(
        value["prompt_id"],
        value["task"],
        [_decode_from_json(item) for item in value["decodes"]],
        Parity(parity["num_passes"], parity["num_equal"], differing, parity["replay_passes"]),
        [DrawnTree(**tree) for tree in value["trees"]],
    )


def _decode_from_json(value: dict[str, Any]) -> LiveDecode:
    difference = value["difference"]
    return LiveDecode(
        **{**value, "difference": None if difference is None else Difference(**difference)}
    )
