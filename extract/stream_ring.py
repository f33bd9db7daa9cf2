"""The ring of streamed feature blocks, in the features folder: what the two sides tell each other, all of it files.

    stream/cursor.json             the trainer's: how far it is (Cursor)
    stream/block-00000012.parquet  a feature shard of training rows, there while it is wanted
    stream/block-00000012.json     after it: its rows and size (BlockRecord)
    stream/claims/                 who makes which block (extract/claims.py)

Either side may be killed between any two files. The trainer alone writes the cursor, extracting workers alone write blocks, and
which blocks should be there follows from the cursor, so that a side that returns looks, and goes on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain

from common.files import fields_of, parse_json
from common.storage import Storage
from extract.stream_order import BlockSequence, SampleWindows

FOLDER = "stream/"
CURSOR_FILE = FOLDER + "cursor.json"
CLAIMS = FOLDER + "claims/"
CURSOR_REMEDY = "delete it, `./launch.sh train` writes it again"
RECORD_REMEDY = "delete it, `./launch.sh extract` makes the block again"


@dataclass(frozen=True)
class Cursor:
    """Positions of the block sequence, each the first of a window."""

    plan: str
    """Fingerprint of what decides the blocks and their order (StreamPlan)."""
    saved: int
    """Where a run continues from its last checkpoint."""
    next: int
    """What is before it has been trained on by every rank."""
    at_once: int
    """The trainer cannot go on without what is before it, from `next`."""
    end: int
    """The run needs nothing from here on."""
    total: int | None = None
    """Samples of the run. None, as below: written before it was kept."""
    run: str | None = None
    """The run's folder: two runs with one stream would each ask for blocks that the other has released."""

    @property
    def is_done(self) -> bool:
        return self.saved == self.end


def cursor_at(
    plan: str, windows: SampleWindows, saved: int, trained: int, batch: int, total: int
) -> Cursor:
    """saved, trained: samples a checkpoint has seen, and the run has; batch: of a step; total: of the run."""
    end = windows.positions(total - 1, 1).stop

    def start(number: int) -> int:
        return windows.positions(number, 1).start if number < total else end

    # the batch that is trained on, the one read beside it, and always the window after the current one
    at_once = windows.positions(trained, 2 * batch).stop
    following = windows.sequence.window_positions(windows.window_of(trained) + 1)
    needed = min(max(at_once, following.stop), end)
    return Cursor(plan, start(saved), start(trained), needed, end, total)


@dataclass(frozen=True)
class BlockRecord:
    plan: str
    num_bytes: int
    sample_ids: list[str]
    """Of the shard's rows, in order."""
    quarantined: list[list[str]]
    """Sample ids of rows that failed a check, with the reason."""


@dataclass(frozen=True)
class Ring:
    storage: Storage

    def read_cursor(self) -> Cursor | None:
        """None if there is none. Raises ValueError if it is not one."""
        value = self._read(CURSOR_FILE)
        with fields_of(self.storage.location(CURSOR_FILE), CURSOR_REMEDY):
            return None if value is None else Cursor(**value)

    def write_cursor(self, cursor: Cursor) -> None:
        self._write(CURSOR_FILE, asdict(cursor))

    def present(self) -> dict[int, int]:
        """Bytes of each block that is there, record and all. One listing."""
        sizes = self.storage.sizes(FOLDER + "block-")
        return {
            block: sizes[block_file(block)]
            for block in map(block_of, sizes)
            if block_file(block) in sizes and record_file(block) in sizes
        }

    def holds(self, block: int) -> bool:
        """`present` of one block."""
        return all(self.storage.exists(name) for name in (block_file(block), record_file(block)))

    def read_record(self, block: int) -> BlockRecord | None:
        """None if there is none. Raises ValueError if it is not one."""
        value = self._read(record_file(block))
        with fields_of(self.storage.location(record_file(block)), RECORD_REMEDY):
            return None if value is None else BlockRecord(**value)

    def write_record(self, block: int, record: BlockRecord) -> None:
        """Once the block is there."""
        self._write(record_file(block), asdict(record))

    def keep_only(self, wanted: Iterable[int]) -> list[int]:
        """Delete every other block and what is left of one; gives those that were there. The record goes first: who
        has seen it can open the block, unless it looks for one that is not wanted any more."""
        kept, dropped = set(wanted), set()
        for name in self.storage.names(FOLDER + "block-"):  # .json before .parquet
            if block_of(name) not in kept:
                self.storage.delete(name)
                dropped.add(block_of(name))
        return sorted(dropped)

    def clear(self) -> None:
        """Nothing is left but the cursor, which says that the training is done."""
        self.keep_only([])
        for name in self.storage.names(CLAIMS):
            self.storage.delete(name)
        if self.storage.folder:
            with contextlib.suppress(
                OSError
            ):  # not there, or a worker came in between: it is harmless
                (self.storage.folder / CLAIMS).rmdir()
        self.storage.remove_leftovers()

    def drop(self, block: int) -> None:
        for name in (record_file(block), block_file(block)):
            self.storage.delete(name)

    def _read(self, name: str) -> dict | None:
        remedy = CURSOR_REMEDY if name == CURSOR_FILE else RECORD_REMEDY
        with contextlib.suppress(FileNotFoundError):
            return parse_json(self.storage.read(name), self.storage.location(name), remedy)
        return None

    def _write(self, name: str, value: dict) -> None:
        self.storage.write(name, (json.dumps(value, ensure_ascii=False) + "\n").encode())


def block_file(block: int) -> str:
    return f"{FOLDER}block-{block:08d}.parquet"


def record_file(block: int) -> str:
    return f"{FOLDER}block-{block:08d}.json"


def wanted_blocks(
    cursor: Cursor, sequence: BlockSequence, num_bytes: Callable[[int], int], budget: int
) -> list[int]:
    """Which blocks should be there, most urgent first, within `budget` bytes.

    First what the trainer cannot go on without; then what it would need again if it were killed now, which saves making it
    again; then as far ahead as there is room. num_bytes: of a block, at most.
    """
    ahead = range(cursor.next, min(cursor.at_once, cursor.end))
    again = range(cursor.saved, cursor.next)
    later = range(ahead.stop, cursor.end)
    wanted: list[int] = []
    for block in _distinct(chain(*map(sequence.distinct_blocks, (ahead, again, later)))):
        budget -= num_bytes(block)
        if budget < 0:
            break
        wanted.append(block)
    return wanted


def _distinct(blocks: Iterable[int]) -> Iterable[int]:
    return dict.fromkeys(blocks)


def block_of(name: str) -> int:
    """The block that a name of the ring belongs to."""
    return int(name.removeprefix(FOLDER + "block-").partition(".")[0])
