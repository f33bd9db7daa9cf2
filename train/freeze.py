"""Which parameters `train.freeze` names. Loads no torch: plans count with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase


def frozen_names(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Names that are a pattern, lie in the module it names, or match its `*`. Raises ValueError if one fits none or all."""
    frozen: set[str] = set()
    for pattern in patterns:
        found = {n for n in names if n.startswith(f"{pattern}.") or fnmatchcase(n, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, [*_modules(names), *names], 3, 0.5)
            raise ValueError(
                f"train.freeze: {pattern!r} names no parameter or module of the drafter; near it: {', '.join(near) or 'nothing'}"
            )
        frozen |= found
    if len(frozen) == len(names):
        raise ValueError(f"train.freeze={list(patterns)} leaves nothing to train; name less")
    return frozen


def _modules(names: Sequence[str]) -> list[str]:
    parts = [name.split(".") for name in names]
    return sorted({".".join(part[:size]) for part in parts for size in range(1, len(part))})
