"""Two evaluations side by side: read, refused where they do not compare, and paired prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import fields_of, read_json
from evaluation.comparison import compare_prompts
from evaluation.prompt_records import ALL_TASKS, Kind, PromptRecord, by_kind, read_prompt_records

NEEDED = {"settings": set[str](), "settled": {"costs"}, "facts": {"run", "drafter"}}
"""What a comparison takes from a report besides the drafter's fingerprint, by section."""
REMEDY = "evaluate the run first, or write its report again with `./launch.sh report`"


@dataclass(frozen=True)
class Evaluation:
    """report.json and the prompt records beside it."""

    path: Path
    report: Mapping[str, Any]
    records: list[PromptRecord]

    @property
    def name(self) -> str:
        return f"{self.report['facts']['run']}: {self.report['facts']['drafter']}"


def find_report(place: Path) -> Path:
    """report.json itself, its folder, or the run's folder. Raises FileNotFoundError with the remedy."""
    candidates = [place, place / "report.json", place / "evaluation" / "report.json"]
    for path in candidates:
        if path.is_file():
            return path
    raise FileNotFoundError(f"no report.json in {place} or {place / 'evaluation'}; {REMEDY}")


def read_evaluation(place: Path) -> Evaluation:
    """Raises FileNotFoundError or ValueError in one line if `place` holds no whole report."""
    path = find_report(place)
    report = read_json(path, REMEDY)
    with fields_of(path, REMEDY):
        records = read_prompt_records(path.parent, report["prompts"])
        for section, names in NEEDED.items():
            missing = names - report[section].keys()
            if missing:
                raise KeyError(min(missing))
        if not isinstance(report["drafter"], str):
            raise TypeError("drafter")
    return Evaluation(path, report, records)


def compare_evaluations(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """compare.json: a row for every kind of decoding that both have, all prompts and each task.

    Raises ValueError in one line if target, settings, prompts or recorded responses differ: then a difference would not be
    the drafters'.
    """
    _require_same_settings(first, second)
    kinds, others = by_kind(first.records), by_kind(second.records)
    shared = [kind for kind in kinds if kind in others and not kind.is_plain]
    if not shared:
        raise ValueError(
            f"{first.path} and {second.path} share no acceptor and budget; set evaluation.budgets alike"
        )
    rows = []
    for kind in shared:
        _require_same_prompts(first, second, kinds[kind], others[kind])
        rows += _rows(kind, kinds[kind], others[kind])
    return {
        "first": _identity(first),
        "second": _identity(second),
        "rows": rows,
        "notes": _notes(first, second, shared),
        "only_first": [asdict(kind) for kind in kinds if kind not in others],
        "only_second": [asdict(kind) for kind in others if kind not in kinds],
    }


def _notes(first: Evaluation, second: Evaluation, kinds: Sequence[Kind]) -> list[str]:
    """What is no reason to refuse and yet must be known."""
    notes = []
    costs = [side.report["settled"]["costs"] for side in (first, second)]
    if costs[0] != costs[1] and any(kind.acceptor == "tree_cost" for kind in kinds):
        notes.append(
            "tree_cost sized its trees by other round costs in A than in B, which is no merit of a drafter; evaluate both with "
            "the same evaluation.cost_file"
        )
    return notes


def _rows(
    kind: Kind, first: Sequence[PromptRecord], second: Sequence[PromptRecord]
) -> list[dict[str, Any]]:
    rows = []
    for task in [ALL_TASKS, *sorted({record.task for record in first})]:
        compared = compare_prompts(
            [record.as_passes for record in first if task in (ALL_TASKS, record.task)],
            [record.as_passes for record in second if task in (ALL_TASKS, record.task)],
        )
        if compared is not None:
            rows.append({"task": task} | asdict(kind) | compared.to_json())
    return rows


def _require_same_settings(first: Evaluation, second: Evaluation) -> None:
    ours, theirs = first.report["settings"], second.report["settings"]
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{first.path} has {key}={ours.get(key)!r}, {second.path} has {theirs.get(key)!r}; "
                "evaluate both with the same target and settings"
            )


def _require_same_prompts(
    first: Evaluation,
    second: Evaluation,
    ours: Sequence[PromptRecord],
    theirs: Sequence[PromptRecord],
) -> None:
    mode = ours[0].mode
    lengths = {record.prompt_id: (record.task, sum(record.passes)) for record in ours}
    others = {record.prompt_id: (record.task, sum(record.passes)) for record in theirs}
    if lengths.keys() != others.keys():
        shared = len(lengths.keys() & others.keys())
        raise ValueError(
            f"{first.path} has {len(lengths)} {mode} prompts, {second.path} has {len(others)}, {shared} of them the same; "
            f"evaluate both on the same corpus with the same evaluation.{mode}_prompts"
        )
    # replay walks records that are there before any drafter: the same prompt must have the same record
    differing = [key for key in lengths if lengths[key] != others[key]]
    if mode == "replay" and differing:
        key = differing[0]
        raise ValueError(
            f"prompt {key} is {lengths[key]} (task, recorded tokens) in {first.path} and {others[key]} in {second.path}; "
            "evaluate both on the same corpus"
        )


def _identity(evaluation: Evaluation) -> dict[str, Any]:
    report = evaluation.report
    return {
        "report": str(evaluation.path),
        "name": evaluation.name,
        "drafter": report["drafter"],
        "facts": report["facts"],
    }
