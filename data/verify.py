"""`./launch.sh data CONFIG --verify`: read a finished corpus again, whole, and hold it to everything that it promises."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from common.progress import Progress
from configs.schema import Config
from data.clean import split_of
from data.corpus import CorpusManifest, CorpusRow, iter_corpus, read_corpus_manifest
from data.settings import require_same_data

logger = logging.getLogger(__name__)

_REMEDY = "remove the corpus folder and run the data stage again"


@dataclass(frozen=True)
class Verified:
    num_rows: int
    num_tokens: int
    num_conversations: int
    num_rejected: int


def verify_corpus(config: Config) -> Verified:
    """Sums of all shards, ids, masks, splits, counts and the list of rejected rows.

    Raises ValueError or FileNotFoundError that names the shard, row or count that is not as it should be.
    """
    folder = config.run.folder / "corpus"
    manifest = read_corpus_manifest(folder)
    require_same_data(f"the corpus in {folder}", manifest.settings, config.data)
    seen = _Seen(config)
    progress = Progress("verifying", manifest.num_rows, "rows")
    for row in iter_corpus(folder, manifest):
        seen.check(row)
        progress.advance()
    progress.finish()
    seen.check_totals(manifest)
    num_rejected = _check_account(folder, manifest)
    done = sum(manifest.counts["total"]["done"].values())
    return Verified(manifest.num_rows, manifest.num_tokens, done, num_rejected)


class _Seen:
    """What the rows so far were; 100 bytes a row."""

    def __init__(self, config: Config):
        self._config = config
        self._auto = {s.name for s in config.data.sources if s.split == "auto"}
        self._ids: set[str] = set()
        self._rows: Counter[str] = Counter()
        self._tokens = self._responses = 0

    def check(self, row: CorpusRow) -> None:
        for problem in self._problems(row):
            raise ValueError(
                f"corpus row {row.sample_id} of source {row.source}: {problem}; {_REMEDY}"
            )
        self._ids.add(row.sample_id)
        self._rows[row.source] += 1
        self._tokens += row.num_tokens
        self._responses += row.num_response_tokens

    def _problems(self, row: CorpusRow) -> Iterator[str]:
        data, vocab_size = self._config.data, self._config.target.vocab_size
        if row.sample_id in self._ids:
            yield "its id occurs twice"
        if len(row.loss_mask) != row.num_tokens or row.num_tokens == 0:
            yield f"{len(row.loss_mask)} mask values for {row.num_tokens} tokens"
        if not row.loss_mask.any() or row.loss_mask[0]:
            yield "no generated token, or no context before the first one"
        if row.num_tokens > data.max_tokens:
            yield f"{row.num_tokens} tokens, above data.max_tokens={data.max_tokens}"
        if int(row.input_ids.min()) < 0 or int(row.input_ids.max()) >= vocab_size:
            yield f"a token id outside the vocabulary of {vocab_size}"
        yield from self._split_problems(row)

    def _split_problems(self, row: CorpusRow) -> Iterator[str]:
        """In `auto` sources the hash of a conversation's start decides, so all cuts of one fall on the same side."""
        messages, data = json.loads(row.messages), self._config.data
        if row.source in self._auto:
            wanted = split_of(messages, data.validation_fraction, data.test_fraction)
            if row.split != wanted:
                yield f"its split is {row.split}, its first user turn says {wanted}"

    def check_totals(self, manifest: CorpusManifest) -> None:
        pairs = {
            "rows": (len(self._ids), manifest.num_rows),
            "tokens": (self._tokens, manifest.num_tokens),
            "response tokens": (self._responses, manifest.num_response_tokens),
        }
        for name, mix in manifest.mix.items():
            pairs[f"rows of source {name}"] = (self._rows[name], mix["rows"])
        for what, (found, stated) in pairs.items():
            if found != stated:
                raise ValueError(
                    f"the shards hold {found} {what}, the manifest says {stated}; {_REMEDY}"
                )


def _check_account(folder: Path, manifest: CorpusManifest) -> int:
    """read = done + rejected, source by source and in total, and the list of rejected rows has as many of each reason."""
    path = folder / "rejected.parquet"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {_REMEDY}")
    table = pq.read_table(path, columns=["source", "reason"])
    listed = Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
    for name, entry in manifest.counts.items():
        done, rejected = sum(entry["done"].values()), sum(entry["rejected"].values())
        if entry["read"] != done + rejected:
            raise ValueError(
                f"source {name}: {entry['read']} rows were read, {done} are done and {rejected} rejected; {_REMEDY}"
            )
        for reason, count in entry["rejected"].items():
            found = listed[(name, reason)] if name != "total" else count
            if found != count:
                raise ValueError(
                    f"source {name}: {count} rows rejected as {reason!r}, {path.name} lists {found}; {_REMEDY}"
                )
    read = {name: entry["read"] for name, entry in manifest.counts.items()}
    total = read.pop("total")
    if total != sum(read.values()):
        raise ValueError(
            f"{total} rows were read in total, the sources' add up to {sum(read.values())}; {_REMEDY}"
        )
    return len(table)
