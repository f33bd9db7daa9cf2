"""report.json: everything measured, in names that other tools may rely on (DESIGN section 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from evaluation.acceptance import PromptPasses, measure_acceptance
from evaluation.decode import PLAIN, STAGES, Acceptor
from evaluation.live import LiveDecode, LiveRecord
from evaluation.replay import ReplayOptions, RowReplay
from evaluation.sums import BIN_EDGES, RECALL_AT, ReplaySums

ALL_TASKS = "all"


@dataclass(frozen=True)
class Identity:
    """Fingerprints of what was evaluated, and facts for a reader's eye."""

    target: str
    drafter: str
    config: str
    facts: dict[str, str]


def build_report(
    identity: Identity,
    options: ReplayOptions,
    replayed: Sequence[RowReplay],
    live: Sequence[LiveRecord],
    sums: ReplaySums,
    record_temperature: float | None,
) -> dict[str, Any]:
    """The whole report. `sums` are those of `replayed`, whose responses were sampled at `record_temperature`."""
    return {
        "target": identity.target,
        "drafter": identity.drafter,
        "config": identity.config,
        "facts": identity.facts,
        "rows": replay_report_rows(options.acceptors, replayed, record_temperature)
        + live_report_rows(live),
        "lossless": _lossless(live),
        "parity": _parity(live),
        "side_by_side": _side_by_side(live),
        "calibration": _calibration(options.acceptors, sums),
        "survival": _survival(options.acceptors, sums),
        "recall": _recall(sums),
    }


def replay_report_rows(
    acceptors: Sequence[Acceptor],
    replayed: Sequence[RowReplay],
    record_temperature: float | None,
) -> list[dict[str, Any]]:
    """A row for each task and acceptor. The temperature is the records': None if the target did not write them."""
    return [
        _row(
            task,
            acceptor.name,
            acceptor.budget,
            "replay",
            record_temperature,
            [
                PromptPasses(row.prompt_id, row.task, tuple(row.passes[acceptor.key]))
                for row in replayed
                if task in (ALL_TASKS, row.task)
            ],
        )
        for task in _tasks(row.task for row in replayed)
        for acceptor in acceptors
    ]


def live_report_rows(live: Sequence[LiveRecord]) -> list[dict[str, Any]]:
    """A row for each task, acceptor and temperature; plain decoding is the one that speeds are compared with."""
    kinds = {(d.acceptor, d.budget, d.temperature): None for record in live for d in record.decodes}
    rows = []
    for task in _tasks(record.task for record in live):
        for kind in kinds:
            found = [
                (record, decode)
                for record in live
                for decode in record.decodes
                if task in (ALL_TASKS, record.task)
                and (decode.acceptor, decode.budget, decode.temperature) == kind
            ]
            prompts = [
                PromptPasses(record.prompt_id, record.task, tuple(decode.passes))
                for record, decode in found
            ]
            row = _row(task, kind[0], kind[1], "live", kind[2], prompts)
            rows.append(row | _speed([decode for _, decode in found]))
    return rows


def _row(
    task: str,
    acceptor: str,
    budget: int | None,
    mode: str,
    temperature: float | None,
    prompts: Sequence[PromptPasses],
) -> dict[str, Any]:
    """Without a single pass there is no acceptance: None."""
    has_passes = any(prompt.passes for prompt in prompts)
    measured = measure_acceptance(prompts) if has_passes else None
    return {
        "task": task,
        "acceptor": acceptor,
        "budget": budget,
        "temperature": temperature,
        "mode": mode,
        "num_prompts": measured.num_prompts if measured else 0,
        "num_passes": measured.num_passes if measured else 0,
        "acceptance_macro": measured.macro if measured else None,
        "acceptance_micro": measured.micro if measured else None,
        "ci95": list(measured.ci95) if measured else None,
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


def _lossless(live: Sequence[LiveRecord]) -> dict[str, Any]:
    """Greedy decodes against plain: a prompt is equal if every acceptor gave plain decoding's tokens."""
    greedy = [record for record in live if any(d.temperature == 0 for d in record.decodes)]
    differing = [
        {"prompt_id": record.prompt_id, "acceptor": d.acceptor, "budget": d.budget}
        | asdict(d.difference)
        for record in greedy
        for d in record.decodes
        if d.difference is not None
    ]
    unequal = {item["prompt_id"] for item in differing}
    return {
        "num_prompts": len(greedy),
        "num_equal": len(greedy) - len(unequal),
        "differing": differing,
    }


def _parity(live: Sequence[LiveRecord]) -> dict[str, Any]:
    return {
        "num_passes": sum(record.parity.num_passes for record in live),
        "num_equal": sum(record.parity.num_equal for record in live),
        "differing": [
            asdict(item) | {"is_near_tie": item.is_near_tie}
            for record in live
            for item in record.parity.differing
        ],
    }


def _side_by_side(live: Sequence[LiveRecord]) -> list[dict[str, Any]]:
    """Greedy live decoding and replay of the very same records, features unrounded: the means must agree."""
    kinds = {
        Acceptor(decode.acceptor, decode.budget): None
        for record in live
        for decode in record.decodes
        if decode.temperature == 0 and decode.acceptor != PLAIN.name
    }
    rows = []
    for acceptor in kinds:
        replayed = [
            PromptPasses(record.prompt_id, record.task, tuple(passes))
            for record in live
            if (passes := record.parity.replay_passes.get(acceptor.key))
        ]
        decoded = [
            PromptPasses(record.prompt_id, record.task, tuple(decode.passes))
            for record in live
            for decode in record.decodes
            if decode.passes
            and (decode.acceptor, decode.budget, decode.temperature)
            == (acceptor.name, acceptor.budget, 0)
        ]
        if replayed and decoded:
            rows.append(
                {
                    "acceptor": acceptor.name,
                    "budget": acceptor.budget,
                    "num_prompts": len(decoded),
                    "live": measure_acceptance(decoded).macro,
                    "replay": measure_acceptance(replayed).macro,
                }
            )
    return rows


def _calibration(acceptors: Sequence[Acceptor], sums: ReplaySums) -> dict[str, Any]:
    """Predicted and realised accepted tokens an anchor; and the hit rate of nodes of the largest tree by probability."""
    num_anchors = max(float(sums.num_anchors), 1.0)
    means = [
        {
            "acceptor": acceptor.name,
            "budget": acceptor.budget,
            "predicted": float(sums.predicted[index]) / num_anchors,
            "realised": float(sums.realised[index]) / num_anchors,
        }
        for index, acceptor in enumerate(acceptors)
    ]
    bins = [
        {
            "low": BIN_EDGES[index],
            "high": BIN_EDGES[index + 1],
            "num_nodes": round(count),
            "predicted": predicted / count,
            "realised": right / count,
        }
        for index, (count, predicted, right) in enumerate(sums.bins.tolist())
        if count
    ]
    return {"accepted_per_anchor": means, "nodes": bins}


def _survival(acceptors: Sequence[Acceptor], sums: ReplaySums) -> list[dict[str, Any]]:
    """share[k-1]: of the anchors with a recorded token at depth k, how many have the recorded prefix in the tree."""
    return [
        {"acceptor": acceptor.name, "budget": acceptor.budget, "share": _share(sums, survived)}
        for acceptor, survived in zip(acceptors, sums.survived, strict=True)
    ]


def _recall(sums: ReplaySums) -> list[dict[str, Any]]:
    return [
        {"k": k, "share": _share(sums, recalled)}
        for k, recalled in zip(RECALL_AT, sums.recalled, strict=True)
    ]


def _share(sums: ReplaySums, numerators: Tensor) -> list[float]:
    pairs = zip(numerators.tolist(), sums.labelled.tolist(), strict=True)
    return [numerator / count for numerator, count in pairs if count]


def _tasks(tasks: Iterable[str]) -> list[str]:
    return [ALL_TASKS, *sorted(set(tasks))]
