"""Reading train.jsonl: a JSON line a logged step, `{"step": ..., name: number, ...}`, that may be being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeGuard


def read_step_log(path: Path) -> list[dict[str, float]]:
    """Its whole lines. Raises ValueError naming one that is no record of a step."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(True), start=1):
        if not line.endswith(b"\n"):
            break  # being written, or cut by a kill
        record = parse_step(line)
        if record is None:
            raise ValueError(
                f"{path} line {number} is no record of a step; remove the line: a resumed run writes later ones again"
            )
        records.append(record)
    return records


def parse_step(line: bytes) -> dict[str, float] | None:
    """None for a line that is no record of a step: cut, or zeros where a machine lost its power."""
    try:
        value = json.loads(line)
    except ValueError:  # no UTF-8, or no JSON
        return None
    return value if _is_record(value) else None


def _is_record(value: object) -> TypeGuard[dict[str, float]]:
    return (
        isinstance(value, dict)
        and isinstance(value.get("step"), int)
        and all(isinstance(number, float) or _is_small(number) for number in value.values())
    )


def _is_small(number: object) -> bool:
    """A whole number that a float can be."""
    return isinstance(number, int) and abs(number) < 2**1000
