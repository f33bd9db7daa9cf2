"""What a person wants to see of doubles: whose they are, and whether the threshold of near-doubles is right."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from configs.schema import DataSection
from data.choose import DUPLICATE, NEAR_DUPLICATE, REASONS, Rows, texts_at
from data.dedupe import agreement, signatures_of

_NUM_PAIRS = 24
_NUM_COMPARED = 480
_TEXT_CHARS = 600


def findings(rows: Rows, data: DataSection) -> dict[str, Any]:
    """doubles_of: source -> reason -> source of the row that stays -> count; near_pairs: texts, the least alike first."""
    return {"doubles_of": _doubles_of(rows, data), "near_pairs": _near_pairs(rows, data)}


def _doubles_of(rows: Rows, data: DataSection) -> dict[str, dict[str, dict[str, int]]]:
    sources, num = rows.source, len(data.sources)
    names = [source.name for source in data.sources]
    found: dict[str, dict[str, dict[str, int]]] = {}
    for verdict in (DUPLICATE, NEAR_DUPLICATE):
        doubles = np.flatnonzero(rows.verdict == verdict)
        pairs = Counter((sources[doubles] * num + sources[rows.of[doubles]]).tolist())
        for pair, count in sorted(pairs.items()):
            of = found.setdefault(names[pair // num], {}).setdefault(REASONS[verdict], {})
            of[names[pair % num]] = count
    return found


def _near_pairs(rows: Rows, data: DataSection) -> list[dict[str, Any]]:
    near = np.flatnonzero(rows.verdict == NEAR_DUPLICATE)
    near = near[np.argsort(rows.order[near, 0], kind="stable")][:_NUM_COMPARED]
    if not len(near):
        return []
    texts = texts_at(rows, np.unique(np.concatenate([near, rows.of[near]])))
    names, sources = [source.name for source in data.sources], rows.source
    found = []
    for row in near:
        pair = [int(row), int(rows.of[row])]
        both = ["\n".join(texts[r]) for r in pair]
        found.append(
            {
                "similarity": round(agreement(signatures_of(both), 0, 1), 3),
                "sources": [names[sources[r]] for r in pair],
                "texts": [text[:_TEXT_CHARS] for text in both],
            }
        )
    found.sort(key=lambda pair: (pair["similarity"], json.dumps(pair, ensure_ascii=False)))
    return found[:_NUM_PAIRS]
