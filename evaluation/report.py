"""report.json: everything measured, in names that other tools may rely on (DESIGN section 8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evaluation.acceptance import measure_acceptance
from evaluation.acceptors import CHAIN
from evaluation.agreement import lossless, parity, side_by_side
from evaluation.clock import STAGES
from evaluation.comparison import compare_prompts
from evaluation.live import LiveDecode, LiveRecord
from evaluation.prompt_records import ALL_TASKS, Kind, PromptRecord, by_kind
from evaluation.replay import ReplayOptions, RowReplay
from evaluation.speed import RoundSeconds, modelled_rows
from evaluation.sums import ReplaySums
from evaluation.tree_quality import calibration, child_rank_rows, recall_rows, survival_rows


@dataclass(frozen=True)
class Identity:
    """Fingerprints of what was evaluated, what two comparable evaluations share, and facts for a reader's eye."""

    target: str
    drafter: str
    config: str
    settings: dict[str, Any]
    """Everything but the drafter that acceptance lengths depend on; compare refuses where they differ."""
    facts: dict[str, str]


@dataclass(frozen=True)
class Settled:
    """What was settled before: temperatures.json's and costs.json's content, None where there is none."""

    temperatures: dict[str, Any] | None = None
    costs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Measured:
    """All records of one evaluation. `sums` are those of `replayed`, whose responses were sampled at `record_temperature`."""

    options: ReplayOptions
    replayed: Sequence[RowReplay]
    live: Sequence[LiveRecord]
    sums: ReplaySums
    record_temperature: float | None
    """None if the target did not write the responses."""
    cost: RoundSeconds | None = None
    """Where it was measured."""
    settled: Settled = Settled()

    def prompt_records(self) -> list[PromptRecord]:
        """Replayed prompts first, acceptors in the order of all tables."""
        return [*self._replayed_records(), *self._live_records()]

    def _replayed_records(self) -> Iterator[PromptRecord]:
        for row in self.replayed:
            for acceptor in self.options.acceptors:
                yield PromptRecord(
                    "replay",
                    self.record_temperature,
                    acceptor.name,
                    acceptor.budget,
                    row.prompt_id,
                    row.task,
                    row.passes[acceptor.key],
                    row.child_ranks[acceptor.key],
                )

    def _live_records(self) -> Iterator[PromptRecord]:
        for record in self.live:
            for decode in record.decodes:
                yield PromptRecord(
                    "live",
                    decode.temperature,
                    decode.acceptor,
                    decode.budget,
                    record.prompt_id,
                    record.task,
                    decode.passes,
                    decode.child_ranks,
                )

    def unfitted(self) -> ReplaySums | None:
        """The sums at drafter temperature 1, where a fit is used."""
        parts = [row.unfitted for row in self.replayed if row.unfitted is not None]
        if not parts:
            return None
        total = ReplaySums.zero(self.sums.acceptors, len(self.sums.labelled))
        for part in parts:
            total += part
        return total


def build_report(
    identity: Identity, measured: Measured, records: Sequence[PromptRecord]
) -> dict[str, Any]:
    """The whole report. records: `measured.prompt_records()`."""
    acceptors, sums = measured.options.acceptors, measured.sums
    rows = report_rows(records, measured.live)
    return {
        "target": identity.target,
        "drafter": identity.drafter,
        "config": identity.config,
        "settings": identity.settings,
        "facts": identity.facts,
        "settled": asdict(measured.settled),
        "rows": rows,
        "gain": gain_rows(records),
        "modelled": _modelled(rows, measured),
        "lossless": lossless(measured.live),
        "parity": parity(measured.live),
        "side_by_side": side_by_side(measured.live),
        "calibration": calibration(acceptors, sums, [row.sums for row in measured.replayed])
        | {"unfitted": _unfitted(measured)},
        "survival": survival_rows(acceptors, sums),
        "recall": recall_rows(sums),
        "child_ranks": child_rank_rows(records),
    }


def report_rows(
    records: Sequence[PromptRecord], live: Sequence[LiveRecord]
) -> list[dict[str, Any]]:
    """A row for each mode, task, acceptor and temperature; plain decoding is the one that speeds are compared with."""
    rows = []
    for mode in ("replay", "live"):
        own = [record for record in records if record.mode == mode]
        for task in _tasks(record.task for record in own):
            for kind, found in by_kind(r for r in own if task in (ALL_TASKS, r.task)).items():
                row = _row(task, kind, found)
                rows.append(row | (_speed(_decodes(live, kind, task)) if mode == "live" else {}))
    return rows


def gain_rows(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    """Every drafted acceptor against the chain at its mode and temperature, prompt by prompt."""
    kinds = by_kind(records)
    rows = []
    for kind, found in kinds.items():
        chain = kinds.get(dataclasses.replace(kind, acceptor=CHAIN.name, budget=None))
        if chain is None or kind.is_plain or kind.acceptor == CHAIN.name:
            continue
        compared = compare_prompts(
            [record.as_passes for record in chain], [record.as_passes for record in found]
        )
        if compared is not None:
            rows.append(asdict(kind) | compared.to_json())
    return rows


def _modelled(rows: Sequence[dict[str, Any]], measured: Measured) -> list[dict[str, Any]]:
    if measured.cost is None or not measured.replayed:
        return []
    replay = [row for row in rows if row["mode"] == "replay" and row["task"] == ALL_TASKS]
    num_nodes = measured.sums.num_nodes / measured.sums.num_anchors.clamp(min=1)
    return modelled_rows(replay, num_nodes.tolist(), measured.cost)


def _unfitted(measured: Measured) -> dict[str, Any] | None:
    sums = measured.unfitted()
    if sums is None:
        return None
    parts = [row.unfitted for row in measured.replayed if row.unfitted is not None]
    return calibration(measured.options.acceptors, sums, parts)


def _decodes(live: Sequence[LiveRecord], kind: Kind, task: str) -> list[LiveDecode]:
    return [
        decode
        for record in live
        for decode in record.decodes
        if task in (ALL_TASKS, record.task)
        and (decode.acceptor, decode.budget, decode.temperature)
        == (kind.acceptor, kind.budget, kind.temperature)
    ]


def _row(task: str, kind: Kind, records: Sequence[PromptRecord]) -> dict[str, Any]:
    """Without a single pass there is no acceptance: None."""
    prompts = [record.as_passes for record in records]
    has_passes = any(prompt.passes for prompt in prompts)
    measured = measure_acceptance(prompts) if has_passes else None
    return {
        "task": task,
        "acceptor": kind.acceptor,
        "budget": kind.budget,
        "temperature": kind.temperature,
        "mode": kind.mode,
        "num_prompts": measured.num_prompts if measured else 0,
        "num_passes": measured.num_passes if measured else 0,
        "acceptance_macro": measured.macro if measured else None,
        "acceptance_micro": measured.micro if measured else None,
        "ci95": list(measured.ci95) if measured and measured.ci95 else None,
        "micro_ci95": list(measured.micro_ci95) if measured and measured.micro_ci95 else None,
        "tokens_per_s": None,
        "stage_share": None,
    }


def _speed(decodes: Sequence[LiveDecode]) -> dict[str, Any]:
    """Emitted tokens over decoding time (prefill in neither), and where that time went."""
    seconds = {stage: sum(decode.seconds[stage] for decode in decodes) for stage in STAGES}
    total = sum(seconds.values())
    emitted = sum(sum(decode.passes) for decode in decodes)
    if emitted == 0:
        return {}
    return {
        "tokens_per_s": emitted / total,
        "stage_share": {stage: spent / total for stage, spent in seconds.items()},
    }


def _tasks(tasks: Iterable[str]) -> list[str]:
    return [ALL_TASKS, *sorted(set(tasks))]
