"""Do the ways of decoding agree? Losslessness, parity with replay, and their means side by side. JSON for report.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evaluation.acceptance import PromptPasses, measure_acceptance
from evaluation.acceptors import PLAIN, Acceptor
from evaluation.live import LiveRecord


def lossless(live: Sequence[LiveRecord]) -> dict[str, Any]:
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


def parity(live: Sequence[LiveRecord]) -> dict[str, Any]:
    return {
        "num_passes": sum(record.parity.num_passes for record in live),
        "num_equal": sum(record.parity.num_equal for record in live),
        "differing": [
            asdict(item) | {"is_near_tie": item.is_near_tie}
            for record in live
            for item in record.parity.differing
        ],
    }


def side_by_side(live: Sequence[LiveRecord]) -> list[dict[str, Any]]:
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
