"""Embedding and head that a self-contained drafter folder carries: taken for the target's own only if they are.

A drafter here always runs with the target's embedding and head. A folder whose copies differ was trained with others, so
what is measured or trained here would not be what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from drafter.folder import find_drafter_folder
from drafter.weights import EMBEDDING, HEAD, find_weights
from target.head import TargetHead

ROWS = 16_384
"""Rows compared at a time, so that no second copy of a large head is alive."""


def require_targets_own(folder: Path, read_target: Callable[[], TargetHead]) -> None:
    """Raises ValueError if the folder carries an embedding or head that is not the target's, in the target's dtype.

    read_target: called only if the folder carries one.
    """
    weights = find_weights(folder, find_drafter_folder(folder).config)
    if not {EMBEDDING, HEAD} & weights.file_of.keys():
        return
    target = read_target()
    for name, wanted in ((EMBEDDING, target.embedding), (HEAD, target.head)):
        if name in weights.file_of:
            row = first_difference(weights.read(name), wanted)
            if row is not None:
                raise ValueError(
                    f"{weights.file_of[name]}: {name} is not the target's (they differ at token {row}); this drafter was "
                    "made for another target, or with a head of its own, which is not supported"
                )


def first_difference(found: Tensor, wanted: Tensor) -> int | None:
    """The first row in which two (V, H) tensors differ once `found` is in the other's dtype; None if they are equal."""
    if found.shape != wanted.shape:
        return 0
    for start in range(0, len(wanted), ROWS):
        part = wanted[start : start + ROWS].cpu()
        other = found[start : start + ROWS].to(part.dtype)
        rows = (part != other).any(1).nonzero()
        if len(rows):
            return start + int(rows[0])
    return None
