"""One fingerprint for settings: sha256 of canonical JSON, and the refusal when two disagree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(value: Any) -> str:
    """64 hex digits, equal for equal JSON values whatever the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def require_equal(
    what: str, found: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str
) -> None:
    """Raises ValueError naming the first setting of `wanted` that differs in `found`, with both values and the remedy."""
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ValueError(
                f"{what} was made with {key}={found.get(key)!r}, this run has {value!r}; {remedy}"
            )
