"""Values of a config.json that somebody else wrote: each of the kind it must be, or one line with key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]
LARGEST = 2**31 - 1
"""No size of a drafter comes near; a bigger one is a broken or hostile file, refused before anything is allocated."""

LONGEST_SHOWN = 100


def shown(value: object) -> str:
    """A value in an error: on one line and short, whatever the file holds."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def whole(values: Values, key: str) -> int:
    """Raises ValueError if the value is missing, no whole number, or too large to be a size or a token."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={shown(value)} must be a whole number")
    if abs(value) > LARGEST:
        raise ValueError(f"{key}={shown(value)} is out of range")
    return value


def number(values: Values, key: str) -> float:
    """Raises ValueError if the value is missing, no number, or not finite."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key}={shown(value)} must be a finite number")
    return float(value)


def whole_numbers(values: Values, key: str) -> tuple[int, ...]:
    """Raises ValueError if the value is missing or no list of whole numbers."""
    items = values.get(key)
    if not isinstance(items, list):
        raise ValueError(f"{key}={shown(items)} must be a list of whole numbers")
    return tuple(whole({key: item}, key) for item in items)


def section(values: Values, key: str, why: str) -> dict[str, Any]:
    """A nested object. Raises ValueError that ends with `why` if it is missing or no object."""
    found = values.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{key} is missing or no object; {why}")
    return found


def require_neutral(values: Values, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ValueError if a key is there with a value other than its neutral ones, which change nothing."""
    for key, allowed in neutral.items():
        if key in values and not _among(values[key], allowed):
            raise ValueError(
                f"{key}={shown(values[key])} is not supported; it must be {allowed[0]!r}"
            )


def _among(value: object, allowed: tuple[object, ...]) -> bool:
    """Equality that does not take 1 for True, nor 0 for False."""
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
