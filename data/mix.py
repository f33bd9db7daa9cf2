"""The mix of a corpus: what each source brings, as the recipe states it and as it came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.schema import DataSection, SourceSection
from data.corpus import CorpusRow


@dataclass
class _Sums:
    category: str
    facts: str
    rows: int = 0
    tokens: int = 0
    response_tokens: int = 0
    thinking_rows: int = 0
    """Rows whose template was told to let the target think; rows that leave it to the run are not among them."""
    licenses: dict[str, int] = field(default_factory=dict)
    """Rows by licence."""


class Mix:
    """Sums over the rows of a corpus, by source."""

    def __init__(self, sources: Sequence[SourceSection]):
        self._sums = {source.name: _Sums(source.category, source.facts) for source in sources}
        self.entries: dict[str, dict[str, Any]] = {}
        """By source, for the manifest; follows every row."""

    def add(self, row: CorpusRow, license: str) -> None:
        sums = self._sums[row.source]
        sums.rows += 1
        sums.tokens += row.num_tokens
        sums.response_tokens += row.num_response_tokens
        sums.thinking_rows += row.thinking is True
        sums.licenses[license] = sums.licenses.get(license, 0) + 1
        self.entries[row.source] = dataclasses.asdict(sums)


def plan_data(data: DataSection) -> list[str]:
    """The data section of a plan: the mix, and what nobody has checked or pinned."""
    lines = mix_table(data)
    if names := unverified(data):
        lines.append(f"licence, size and columns unverified: {', '.join(names)}")
    if names := unpinned(data):
        lines.append(
            f"{len(names)} hub sources name no commit, so the hub may change them; ./launch.sh data CONFIG --pin writes it"
        )
    return lines


def mix_table(data: DataSection) -> list[str]:
    """The recipe's mix as lines of text: samples and tokens as stated, a line a source, then by category."""
    head = f"{'source':<24}{'category':<14}{'read':>11}{'take':>10}{'share':>7}{'tokens':>9}{'thinking':>10}  licence"
    total = sum(source.take or 0 for source in data.sources if source.split != "test")
    return [
        head,
        *(_source_line(source, data, total) for source in data.sources),
        *_category_lines(data, total),
    ]


def unverified(data: DataSection) -> list[str]:
    """Sources of which nobody has checked licence, size and columns."""
    return [s.name for s in data.sources if s.kind == "datasets" and s.facts == "unverified"]


def unpinned(data: DataSection) -> list[str]:
    """Hub sets whose revision is not a commit."""
    return [s.name for s in data.sources if s.kind == "datasets" and s.revision is None]


def _source_line(source: SourceSection, data: DataSection, total: int) -> str:
    take = "all" if source.take is None else f"{source.take:,}"
    is_test = source.split == "test"
    share = "test" if is_test else f"{(source.take or 0) / total:.1%}" if total else "-"
    return (
        f"{source.name:<24}{source.category:<14}{_number(source.read):>11}{take:>10}{share:>7}"
        f"{_tokens(_expected(source, data)):>9}{_mode(source):>10}  {source.license}"
        + (" (unverified)" if source.name in unverified(data) else "")
    )


def _category_lines(data: DataSection, total: int) -> list[str]:
    takes: dict[str, int] = {}
    tokens: dict[str, float] = {}
    for source in data.sources:
        if source.split != "test":
            takes[source.category] = takes.get(source.category, 0) + (source.take or 0)
            tokens[source.category] = tokens.get(source.category, 0) + (
                _expected(source, data) or 0
            )
    if not total:
        return []
    lines = [
        f"{'':<24}{category:<14}{'':>11}{take:>10,}{take / total:>7.1%}{_tokens(tokens[category]):>9}"
        for category, take in takes.items()
    ]
    whole = f"{'total':<38}{'':>11}{total:>10,}{1:>7.0%}{_tokens(sum(tokens.values())):>9}"
    return ["", *lines, whole]


def _expected(source: SourceSection, data: DataSection) -> float | None:
    mean = source.expected_tokens or data.expected_tokens
    return None if source.take is None or mean is None else source.take * mean


def _mode(source: SourceSection) -> str:
    if source.thinking is None:
        return "as run"
    return f"{float(source.thinking):.0%}"


def _number(value: int | None) -> str:
    return "all" if value is None else f"{value:,}"


def _tokens(value: float | None) -> str:
    if not value:
        return "-"
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.1f} M"
