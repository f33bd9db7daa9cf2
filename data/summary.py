"""What the corpus page counts: one pass over the shards' columns, memory independent of the number of rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data.corpus import CorpusManifest

_BINS_PER_OCTAVE = 8
_NUM_SAMPLES = 3
_NUM_REJECTED = 6
_TEXT_CHARS = 3000


@dataclass
class Lengths:
    """Of a set of rows; counts by bin, an eighth of an octave each."""

    num_rows: int = 0
    num_finished: int = 0
    prompt: Counter[int] = field(default_factory=Counter)
    """Tokens that were not generated."""
    response: Counter[int] = field(default_factory=Counter)
    longest_prompt: int = 0
    longest_response: int = 0

    def add(self, prompt: int, response: int, finished: bool) -> None:
        self.num_rows += 1
        self.longest_prompt = max(self.longest_prompt, prompt)
        self.longest_response = max(self.longest_response, response)
        self.num_finished += finished
        self.prompt[length_bin(prompt)] += 1
        self.response[length_bin(response)] += 1

    def prompt_at(self, share: float) -> int:
        return min(_percentile(self.prompt, share), self.longest_prompt)

    def response_at(self, share: float) -> int:
        return min(_percentile(self.response, share), self.longest_response)


@dataclass(frozen=True)
class Sample:
    split: str
    messages: list[dict[str, Any]]
    """Their text cut at 3,000 characters."""
    num_tokens: int
    num_response_tokens: int
    finished: bool
    thinking: bool | None


@dataclass(frozen=True)
class RejectedExample:
    source: str
    row: str
    detail: str
    text: str


@dataclass
class Summary:
    total: Lengths = field(default_factory=Lengths)
    by_source: dict[str, Lengths] = field(default_factory=dict)
    by_category: dict[str, Lengths] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    rejected: dict[str, list[RejectedExample]] = field(default_factory=dict)
    """By reason."""


def length_bin(tokens: int) -> int:
    return 0 if tokens < 1 else 1 + round(math.log2(tokens) * _BINS_PER_OCTAVE)


def bin_end(number: int) -> int:
    """The longest length in a bin."""
    return 0 if number == 0 else math.floor(2 ** ((number - 0.5) / _BINS_PER_OCTAVE))


def summarise(folder: Path, manifest: CorpusManifest) -> Summary:
    summary = Summary()
    for name in manifest.mix:
        summary.by_source[name] = Lengths()
        summary.by_category.setdefault(manifest.mix[name]["category"], Lengths())
    for row in _rows(folder, manifest):
        response = row["num_response_tokens"]
        counted = (row["num_tokens"] - response, response, row["finished"])
        name = row["source"]
        for lengths in (
            summary.total,
            summary.by_source[name],
            summary.by_category[manifest.mix[name]["category"]],
        ):
            lengths.add(*counted)
    _add_samples(summary, folder, manifest)
    _add_rejected(summary, folder)
    return summary


def _rows(folder: Path, manifest: CorpusManifest) -> Iterator[dict[str, Any]]:
    columns = ["source", "num_tokens", "num_response_tokens", "finished"]
    for shard in manifest.shards:
        with pq.ParquetFile(folder / shard.file) as file:
            for batch in file.iter_batches(8192, columns=columns):
                yield from batch.to_pylist()


def _add_samples(summary: Summary, folder: Path, manifest: CorpusManifest) -> None:
    """The first of each source; shards are read only until all are found."""
    columns = [
        "source",
        "split",
        "messages",
        "num_tokens",
        "num_response_tokens",
        "finished",
        "thinking",
    ]
    wanted = {name: min(_NUM_SAMPLES, mix["rows"]) for name, mix in manifest.mix.items()}
    summary.samples = {name: [] for name in wanted}
    for shard in manifest.shards:
        with pq.ParquetFile(folder / shard.file) as file:
            for batch in file.iter_batches(512, columns=columns):
                for row in batch.to_pylist():
                    if len(summary.samples[row["source"]]) < wanted[row["source"]]:
                        summary.samples[row["source"]].append(_sample(row))
                if all(len(summary.samples[name]) == count for name, count in wanted.items()):
                    return


def _sample(row: dict[str, Any]) -> Sample:
    messages = [
        {"role": m["role"], "content": _shown(m)[:_TEXT_CHARS]} for m in json.loads(row["messages"])
    ]
    return Sample(
        row["split"],
        messages,
        row["num_tokens"],
        row["num_response_tokens"],
        row["finished"],
        row["thinking"],
    )


def _shown(message: dict[str, Any]) -> str:
    """A message as one text: thinking, answer, calls."""
    parts = [f"<think>\n{t}\n</think>" for t in [message.get("reasoning_content")] if t]
    parts += [message["content"]]
    parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", [])]
    return "\n".join(part for part in parts if part)


def _add_rejected(summary: Summary, folder: Path) -> None:
    with pq.ParquetFile(folder / "rejected.parquet") as file:
        for batch in file.iter_batches(8192):
            for row in batch.to_pylist():
                found = summary.rejected.setdefault(row["reason"], [])
                if len(found) < _NUM_REJECTED and not (
                    found and found[-1].source == row["source"] and len(found) > 3
                ):
                    found.append(
                        RejectedExample(
                            row["source"], row["row"], row["detail"] or "", row["text"] or ""
                        )
                    )
    summary.rejected = dict(sorted(summary.rejected.items()))


def _percentile(counts: Counter[int], share: float) -> int:
    rest = share * counts.total()
    for number in sorted(counts):
        rest -= counts[number]
        if rest <= 1e-9:
            return bin_end(number)
    return 0
