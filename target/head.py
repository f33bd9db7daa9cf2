"""The target's frozen embedding and output head, in a file of their own: training needs nothing else of the target.

Shapes: V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.files import atomic_path
from target.load import Target

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetHead:
    embedding: Tensor
    """(V, H)"""
    head: Tensor
    """(V, H); the same storage as `embedding` when the target ties them."""


def save_target_head(path: Path, target: Target) -> None:
    """Write embedding and head, in the target's dtype; a tied head is not written twice."""
    embedding, head = target.embed_tokens, target.lm_head
    tensors = {_EMBEDDING: embedding}
    if head.data_ptr() != embedding.data_ptr():
        tensors[_HEAD] = head
    with atomic_path(path) as aside:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, aside)


def load_target_head(
    path: Path, device: torch.device | str, dtype: torch.dtype | None
) -> TargetHead:
    """In `dtype`; None keeps the stored one. Raises FileNotFoundError or ValueError naming the file and the remedy."""
    remedy = "delete it and run the extract stage again, which writes it"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); {remedy}") from error
    if _EMBEDDING not in tensors or not tensors.keys() <= {_EMBEDDING, _HEAD}:
        raise ValueError(f"{path} holds {sorted(tensors)}, expected {_EMBEDDING}; {remedy}")
    tensors = {name: tensor.to(device, dtype or tensor.dtype) for name, tensor in tensors.items()}
    embedding = tensors[_EMBEDDING]
    head = tensors.get(_HEAD, embedding)
    return TargetHead(embedding, head)
