"""The last step of a corpus: labelled conversations into shards, and the account of every row that was read.

corpus/shard-*.parquet, manifest.json   data/corpus.py
corpus/rejected.parquet                 every row that is no sample: source, row, reason, detail, start of its text
corpus/decontamination.jsonl            of those, the ones that held a test prompt: which one, by which n-gram
corpus/findings.json                    doubles between sources, pairs of near-doubles
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import atomic_path
from configs.schema import DataSection
from data.corpus import CorpusRow, write_corpus
from data.dialogue import COMPLETE, Dialogue, corpus_rows
from data.judge import excerpt
from data.labels import Labels
from data.mix import Mix
from data.plan import Plan
from data.prompts import SourceCounts
from data.selection import REJECTED_SCHEMA

BEYOND_TAKE = "beyond take"
REPORTS = ("decontamination.jsonl", "findings.json")


def assemble(folder: Path, plan: Plan, data: DataSection, labels: Labels) -> None:
    """Write the corpus and delete its units. Main rank only.

    Raises ValueError if no sample is left.
    """
    counts: dict[str, Any] = {}
    account = _Account(plan, data)
    rows = account.rows(labels, counts)
    first = next(rows, None)
    if first is None:
        # labels of this recipe would refuse a corrected one
        shutil.rmtree(plan.folder)
        raise ValueError(
            f"no sample is left: {counts['total']['rejected']}; change what rejected them (data.responses, "
            "data.min_response_tokens, data.max_repetition, data.max_prompt_tokens) or add sources"
        )
    for name in REPORTS:
        with atomic_path(folder / name) as aside:
            shutil.copyfile(plan.folder / name, aside)
    stream = account.and_reports(itertools.chain([first], rows), folder)
    write_corpus(folder, stream, plan.settings, counts, data.rows_per_shard, account.mix.entries)
    shutil.rmtree(plan.folder)


class _Account:
    """What becomes of every prompt: the first `take` accepted ones of a source are samples."""

    def __init__(self, plan: Plan, data: DataSection):
        self._plan, self._tally = plan, plan.counts
        self._left = {source.name: source.take for source in data.sources}
        self.mix = Mix(data.sources)
        self._rejected: list[dict[str, str]] = []

    def rows(self, labels: Labels, counts: dict[str, Any]) -> Iterator[CorpusRow]:
        """The corpus in order; after the last row `counts` holds what became of every row that was read."""
        for index in range(self._plan.num_chunks):
            for dialogue in labels.dialogues(index):
                if self._is_kept(dialogue):
                    for row in corpus_rows(dialogue):
                        self.mix.add(row, dialogue.prompt.license)
                        yield row
        counts.update(_summary(self._tally))

    def and_reports(self, rows: Iterator[CorpusRow], folder: Path) -> Iterator[CorpusRow]:
        """The same rows; after the last one, and so before the manifest, the list of all others is written."""
        yield from rows
        early = pq.read_table(self._plan.folder / "rejected.parquet")
        late = pa.Table.from_pylist(self._rejected, REJECTED_SCHEMA)
        with atomic_path(folder / "rejected.parquet") as aside:
            pq.write_table(pa.concat_tables([early, late]), aside, compression="zstd")

    def _is_kept(self, dialogue: Dialogue) -> bool:
        prompt, ended = dialogue.prompt, dialogue.ended
        assert ended is not None
        source, left = self._tally[prompt.source], self._left[prompt.source]
        reason = ended if not dialogue.rows else BEYOND_TAKE if left == 0 else None
        if reason is not None:
            source.rejected[reason] += 1
            record = {"source": prompt.source, "row": prompt.where, "reason": reason}
            self._rejected.append(record | {"detail": "", "text": excerpt(prompt.messages)})
            return False
        if left is not None:
            self._left[prompt.source] = left - 1
        source.done[prompt.split] += 1
        source.rows += len(dialogue.rows)
        if ended != COMPLETE:
            source.ended_early[ended] += 1
        return True


def _summary(tally: Mapping[str, SourceCounts]) -> dict[str, Any]:
    counts = {name: _entry(source) for name, source in tally.items()}
    total = SourceCounts()
    for source in tally.values():
        total.read += source.read
        total.done += source.done
        total.rejected += source.rejected
        total.rows += source.rows
        total.ended_early += source.ended_early
    return {**counts, "total": _entry(total)}


def _entry(source: SourceCounts) -> dict[str, Any]:
    assert source.read == source.done.total() + source.rejected.total(), source
    return {
        "read": source.read,
        "done": {split: source.done[split] for split in ("train", "validation", "test")},
        "rejected": {reason: num for reason, num in sorted(source.rejected.items()) if num},
        "rows": source.rows,
        "ended_early": dict(sorted(source.ended_early.items())),
    }
