"""First pass over the sources: every block of rows becomes a part on disk, shared by the ranks, kept over any kill.

    corpus/units/scan/settings.json          what the parts were made with
    corpus/units/scan/000-00012.parquet      block 12 of source 0: rows judged one by one, in the source's order
    corpus/units/scan/000.json               source 0 was read to its end: how many blocks

A part holds what the second pass (data/choose.py) needs of a row: identity, double key, signature, prompt; of a rejected
row its reason. Its bytes depend on settings and source alone, so double work is harmless and no rank counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.distributed import Ranks
from common.files import atomic_path, read_json, write_json
from common.progress import Progress
from configs.schema import Config, DataSection, SourceSection
from data.clean import double_key, user_texts
from data.dedupe import signatures_of
from data.judge import MALFORMED, Reject, judge
from data.plan import PROMPT_SCHEMA, prompt_record
from data.prompts import Prompt
from data.sources import Block, Places, count_rows, is_streamed, read_blocks
from data.template import ChatTemplate

logger = logging.getLogger(__name__)

KEY_BYTES = 16
SCHEMA = pa.schema(
    [
        *PROMPT_SCHEMA,
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("text", pa.string()),
        ("double", pa.binary(KEY_BYTES)),
        ("order", pa.binary(KEY_BYTES)),
        ("signature", pa.binary()),
    ]
)
_REMEDY = "remove the corpus' units folder and run the data stage again"


@dataclass(frozen=True)
class Scan:
    """Where the parts of a recipe lie."""

    folder: Path
    sources: tuple[SourceSection, ...]

    def part(self, source: int, block: int) -> Path:
        return self.folder / f"{source:03d}-{block:05d}.parquet"

    def end(self, source: int) -> Path:
        return self.folder / f"{source:03d}.json"

    def parts(self) -> Iterator[tuple[SourceSection, Path]]:
        """All parts in the order of sources and rows. Call when every source was read to its end."""
        for number, source in enumerate(self.sources):
            num_blocks = read_json(self.end(number), _REMEDY)["num_blocks"]
            yield from ((source, self.part(number, block)) for block in range(num_blocks))


def scan_sources(
    config: Config, scan: Scan, places: Places, template: ChatTemplate, ranks: Ranks
) -> None:
    """Make this rank's parts that are not there yet. Ranks share files by blocks, and streamed sources whole.

    Raises ValueError for a row of an unknown shape (see data.max_malformed), FileNotFoundError for a missing source.
    """
    for number, source in enumerate(scan.sources):
        if scan.end(number).is_file() and not _missing(scan, number):
            continue
        owner = number % ranks.world_size
        if is_streamed(source) and owner != ranks.rank:
            continue
        _scan_source(config, scan, number, places, template, ranks)


def refuse_malformed(scan: Scan, max_malformed: float) -> None:
    """Raises ValueError with a source's share of rows of unknown shape, and one example, if it is above the limit."""
    read: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    for source, path in scan.parts():
        num_rows, reasons = count_reasons(path)
        read[source.name] += num_rows
        malformed[source.name] += reasons[MALFORMED]
    for source in scan.sources:
        if malformed[source.name] > max_malformed * read[source.name]:
            raise ValueError(
                f"data.sources {source.name!r}: {malformed[source.name]} of {read[source.name]} rows are of an unknown shape, "
                f"above data.max_malformed={max_malformed}; the first: {_first_malformed(scan, source)}"
            )


def _first_malformed(scan: Scan, source: SourceSection) -> str:
    for found, path in scan.parts():
        if found == source:
            table = pq.read_table(path, columns=["reason", "detail"])
            for reason, detail in zip(*(c.to_pylist() for c in table.columns), strict=True):
                if reason == MALFORMED:
                    return detail
    raise AssertionError("counted, but not found")


def _missing(scan: Scan, number: int) -> bool:
    num_blocks = read_json(scan.end(number), _REMEDY)["num_blocks"]
    return not all(scan.part(number, block).is_file() for block in range(num_blocks))


def _scan_source(
    config: Config,
    scan: Scan,
    number: int,
    places: Places,
    template: ChatTemplate,
    ranks: Ranks,
) -> None:
    source = scan.sources[number]
    shared = not is_streamed(source)
    progress = _SourceProgress(source, places, ranks.is_main)
    num_blocks = 0
    for block in read_blocks(source, places):
        num_blocks += 1
        path = scan.part(number, block.number)
        mine = not shared or block.number % ranks.world_size == ranks.rank
        if mine and not path.is_file():
            judged = [judge(row, source, config.data, template) for row in block.rows()]
            _refuse_all_malformed(judged)
            _write_part(path, judged, config.data, config.run.seed)
        progress.advance(block)
    write_json(scan.end(number), {"source": source.name, "num_blocks": num_blocks})
    progress.finish()


class _SourceProgress:
    """With an ETA if the number of rows is known, else a count now and then. Only the main rank counts and tells."""

    def __init__(self, source: SourceSection, places: Places, is_main: bool):
        self._name, self._num_read = source.name, 0
        total = count_rows(source) if is_main else None
        self._progress = Progress(f"reading {source.name}", total, "rows") if total else None

    def advance(self, block: Block) -> None:
        self._num_read += block.num_rows
        if self._progress is not None:
            self._progress.advance(block.num_rows)
        elif block.number % 20 == 19:
            logger.info("reading %s: %d rows so far", self._name, self._num_read)

    def finish(self) -> None:
        logger.info("source %s: %d rows", self._name, self._num_read)


def _refuse_all_malformed(judged: Sequence[Prompt | Reject]) -> None:
    """Wrong columns are said after the first block, not after the last row."""
    bad = [j for j in judged if isinstance(j, Reject) and j.reason == MALFORMED]
    if judged and len(bad) == len(judged):
        raise ValueError(bad[0].detail)


def _write_part(
    path: Path, judged: Sequence[Prompt | Reject], data: DataSection, seed: int
) -> None:
    prompts = [j for j in judged if isinstance(j, Prompt)]
    signatures: Iterator[bytes | None] = iter([None] * len(prompts))
    if data.near_duplicate_similarity is not None and prompts:
        texts = ["\n".join(user_texts(prompt.messages)) for prompt in prompts]
        signatures = (row.tobytes() for row in signatures_of(texts))
    records = [
        _rejected(j) if isinstance(j, Reject) else _kept(j, seed, next(signatures)) for j in judged
    ]
    with atomic_path(path) as aside:
        pq.write_table(
            pa.Table.from_pylist(records, SCHEMA), aside, compression="zstd", compression_level=1
        )


def _kept(prompt: Prompt, seed: int, signature: bytes | None) -> dict[str, Any]:
    return prompt_record(prompt) | {
        "double": bytes.fromhex(_double_key(prompt)),
        "order": hashlib.sha256(f"{seed}:{prompt.sample_id}".encode()).digest()[:KEY_BYTES],
        "signature": signature,
    }


def _double_key(prompt: Prompt) -> str:
    """A test prompt may be evaluated thinking and not; in training the second is a double."""
    key = double_key(prompt.messages)
    if prompt.split != "test" or prompt.thinking is None:
        return key
    return hashlib.sha256(f"{key}:{prompt.thinking}".encode()).hexdigest()[: 2 * KEY_BYTES]


def _rejected(reject: Reject) -> dict[str, Any]:
    return vars(reject)


def count_reasons(path: Path) -> tuple[int, Counter[str]]:
    """Rows of a part, and its rejected ones by reason."""
    reasons = pq.read_table(path, columns=["reason"])["reason"]
    return len(reasons), Counter(reason for reason in reasons.to_pylist() if reason is not None)


def begin_scan(folder: Path, settings: dict[str, Any], offline: bool) -> None:
    """Note what the parts are made with, before the first one."""
    write_json(folder / "settings.json", {"settings": settings, "offline": offline})


def read_scan_settings(folder: Path) -> dict[str, Any] | None:
    """{settings, offline} of a begun scan; None if none was begun."""
    path = folder / "settings.json"
    return read_json(path, _REMEDY) if path.is_file() else None


def messages_of(text: str) -> list[dict[str, Any]]:
    return json.loads(text)
