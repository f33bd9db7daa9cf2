"""Second pass: of all judged rows, which become prompts, in which order, and why the others do not.

Rules, in this order: of equal prompts the first stays (test prompts come first, then sources as listed, then rows as read);
of near-doubles too; training rows that hold a test prompt go; of what is left each source gives its first `take` (and spares)
in the order of a hash of run.seed and content. Memory is some hundred bytes a row; prompts are on disk throughout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from common.distributed import Ranks, barrier, raise_together
from common.files import read_json, sha256_file, write_json
from common.progress import Progress
from configs.schema import DataSection, SourceSection
from data.clean import user_texts
from data.contamination import Evidence, Hit, TestPrompt
from data.dedupe import PLACES, first_of_equal, near_duplicates
from data.scan import KEY_BYTES, Scan, messages_of

logger = logging.getLogger(__name__)

KEPT, DUPLICATE, NEAR_DUPLICATE, CONTAMINATED, BEYOND_TAKE = range(5)
REASONS = (
    "",
    "duplicate",
    "near duplicate",
    "contaminated by a test prompt",
    "beyond take",
)


@dataclass
class Rows:
    """The rows that the first pass kept, R of them, in the order of sources and rows."""

    parts: list[Path]
    source_of_part: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]
    """(R,) index into parts"""
    place: npt.NDArray[np.int64]
    """(R,) row inside the part"""
    is_test: npt.NDArray[np.bool_]
    double: npt.NDArray[np.uint64]
    """(R, 2)"""
    order: npt.NDArray[np.uint64]
    """(R, 2)"""
    where: pa.ChunkedArray
    verdict: npt.NDArray[np.int8]
    of: npt.NDArray[np.int64]
    """(R,) for doubles, the row that stays; else -1"""
    hits: dict[int, Hit]

    @property
    def source(self) -> npt.NDArray[np.int64]:
        return self.source_of_part[self.part]

    def alive(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.verdict == KEPT)


def choose_rows(data: DataSection, scan: Scan, ranks: Ranks) -> Rows | None:
    """The verdicts, on the main rank; the others help to look for test prompts and get None. All ranks enter."""
    rows: Rows | None = None
    with raise_together(ranks):
        if ranks.is_main:
            rows = _load(scan)
            _drop_doubles(rows)
            _drop_near_doubles(rows, data, scan.folder)
            if data.decontaminate_ngram:
                evidence = _evidence(rows, data)
                evidence.write(scan.folder / "evidence.json")
    if data.decontaminate_ngram:
        with raise_together(ranks):
            find_contaminated(scan, ranks)
        barrier()
    if rows is None:
        return None
    if data.decontaminate_ngram:
        _drop_contaminated(rows, scan)
    _drop_beyond_take(rows, data)
    return rows


def _load(scan: Scan) -> Rows:
    parts = list(scan.parts())
    names = [source.name for source in scan.sources]
    # sources without a row have no part
    empty, keys = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.uint64)
    columns: list[tuple[npt.NDArray[Any], ...]] = [(empty, empty, empty.astype(bool), keys, keys)]
    where: list[pa.Array] = []
    for number, (_, path) in enumerate(parts):
        table = pq.read_table(path, columns=["reason", "split", "double", "order", "where"])
        kept = np.flatnonzero(table["reason"].is_null().to_numpy())
        table = table.take(pa.array(kept)).combine_chunks()
        where += table["where"].chunks
        columns.append(
            (
                np.full(len(kept), number),
                kept,
                np.array([s == "test" for s in table["split"].to_pylist()], dtype=bool),
                _keys(table["double"]),
                _keys(table["order"]),
            )
        )
    part, place, is_test, double, order = (
        np.concatenate(found) for found in zip(*columns, strict=True)
    )
    return Rows(
        parts=[path for _, path in parts],
        source_of_part=np.array([names.index(source.name) for source, _ in parts]),
        part=part,
        place=place,
        is_test=is_test,
        double=double,
        order=order,
        where=pa.chunked_array(where, pa.string()),
        verdict=np.zeros(len(part), dtype=np.int8),
        of=np.full(len(part), -1, dtype=np.int64),
        hits={},
    )


def _keys(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """(R, 2): 16 bytes as two numbers whose order is that of the bytes."""
    data = b"".join(column.to_pylist())
    return np.frombuffer(data, dtype=">u8").astype(np.uint64).reshape(-1, KEY_BYTES // 8)


def _precedence(rows: Rows) -> npt.NDArray[np.int64]:
    """Rows that are still in, test prompts first: of two equal ones the test's stays."""
    alive = rows.alive()
    return alive[np.argsort(~rows.is_test[alive], kind="stable")]


def _drop_doubles(rows: Rows) -> None:
    order = _precedence(rows)
    first = first_of_equal(rows.double[order])
    is_double = first != np.arange(len(order))
    rows.verdict[order[is_double]] = DUPLICATE
    rows.of[order[is_double]] = order[first[is_double]]


def _drop_near_doubles(rows: Rows, data: DataSection, folder: Path) -> None:
    if data.near_duplicate_similarity is None:
        return
    order = _precedence(rows)
    if not len(order):
        return
    signatures = gather_signatures(rows, order, folder / "signatures.u32")
    first = near_duplicates(signatures, data.near_duplicate_similarity, rows.is_test[order])
    is_double = first >= 0
    rows.verdict[order[is_double]] = NEAR_DUPLICATE
    rows.of[order[is_double]] = order[first[is_double]]


def gather_signatures(
    rows: Rows, order: npt.NDArray[np.int64], path: Path
) -> npt.NDArray[np.uint32]:
    """(len(order), PLACES), a file that is mapped: the system keeps of it what memory allows."""
    signatures = np.memmap(path, dtype=np.uint32, mode="w+", shape=(len(order), PLACES))
    position = np.full(len(rows.part), -1, dtype=np.int64)
    position[order] = np.arange(len(order))
    for number, chosen in by_part(rows, order):
        column = pq.read_table(rows.parts[number], columns=["signature"])["signature"]
        data = b"".join(column.take(pa.array(rows.place[chosen])).to_pylist())
        signatures[position[chosen]] = np.frombuffer(data, dtype=np.uint32).reshape(-1, PLACES)
    return signatures


def by_part(
    rows: Rows, chosen: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(part, those of `chosen` in it, in its order) of every part that has any."""
    chosen = np.sort(chosen)
    parts = rows.part[chosen]
    numbers, starts = np.unique(parts, return_index=True)
    ends = [*starts[1:].tolist(), len(chosen)]
    for number, start, end in zip(
        numbers.tolist(), starts.tolist(), ends[: len(starts)], strict=True
    ):
        yield number, chosen[start:end]


def texts_at(rows: Rows, chosen: npt.NDArray[np.int64]) -> dict[int, tuple[str, ...]]:
    """User turns of some rows."""
    texts: dict[int, tuple[str, ...]] = {}
    for number, found in by_part(rows, chosen):
        column = pq.read_table(rows.parts[number], columns=["messages"])["messages"]
        messages = column.take(pa.array(rows.place[found])).to_pylist()
        texts |= {
            int(r): tuple(user_texts(messages_of(m))) for r, m in zip(found, messages, strict=True)
        }
    return texts


def _evidence(rows: Rows, data: DataSection) -> Evidence:
    tests = rows.alive()[rows.is_test[rows.alive()]]
    texts = texts_at(rows, tests)
    sources = rows.source
    prompts = [
        TestPrompt(data.sources[sources[r]].name, rows.where[int(r)].as_py(), texts[int(r)])
        for r in tests
    ]
    return Evidence.of(prompts, data.decontaminate_ngram)


def find_contaminated(scan: Scan, ranks: Ranks) -> None:
    """Look for test prompts in this rank's share of the parts. A part's finds are a file beside it, `000-00012.hits.json`."""
    path = scan.folder / "evidence.json"
    evidence, identity = Evidence.read(path), sha256_file(path)
    parts = [part for _, part in scan.parts()][ranks.rank :: ranks.world_size]
    progress = Progress("looking for test prompts", len(parts), "blocks")
    for part in parts:
        hits_file = part.with_suffix(".hits.json")
        if not hits_file.is_file() or read_json(hits_file, "remove it")["evidence"] != identity:
            write_json(hits_file, {"evidence": identity, "hits": _hits_in(part, evidence)})
        progress.advance()
    progress.finish()


def _hits_in(part: Path, evidence: Evidence) -> dict[str, list[str]]:
    """By row of the part; test prompts themselves are not looked at."""
    table = pq.read_table(part, columns=["reason", "split", "messages"])
    found = {}
    for row, (reason, split, messages) in enumerate(
        zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    ):
        if reason is None and split != "test":
            hit = evidence.hit(messages_of(messages))
            if hit is not None:
                found[str(row)] = [hit.ngram, hit.test_source, hit.test_where]
    return found


def _drop_contaminated(rows: Rows, scan: Scan) -> None:
    for number, found in by_part(rows, rows.alive()):
        hits = read_json(rows.parts[number].with_suffix(".hits.json"), "remove the units folder")
        for row in found:
            hit = hits["hits"].get(str(rows.place[row]))
            if hit is not None:
                rows.verdict[row] = CONTAMINATED
                rows.hits[int(row)] = Hit(*hit)


def corpus_order(rows: Rows, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`chosen` by the hash of seed and content."""
    keys = rows.order[chosen]
    return chosen[np.lexsort((keys[:, 1], keys[:, 0]))]


def num_wanted(source: SourceSection, spare_fraction: float) -> float:
    """Prompts that a source gives: its `take` and the spares that may replace rejected responses."""
    return math.inf if source.take is None else math.ceil(source.take * (1 + spare_fraction))


def _drop_beyond_take(rows: Rows, data: DataSection) -> None:
    ordered = corpus_order(rows, rows.alive())
    sources = rows.source[ordered]
    for number, source in enumerate(data.sources):
        mine = ordered[sources == number]
        wanted = num_wanted(source, data.spare_fraction)
        if len(mine) > wanted:
            rows.verdict[mine[int(wanted) :]] = BEYOND_TAKE
