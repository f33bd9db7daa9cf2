"""Soft labels: the target's likeliest tokens in place of every response token, optional columns of a feature shard.

S tokens, P = extract.soft_labels tokens kept. Entry t is the target's distribution of token t given all tokens before it: of
its P likeliest tokens, falling. What is left of the probability is one tail. Entries of tokens that the target did not
generate are zero and of no meaning. 8 P bytes a token, next to 2 D H of features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data.codecs import BlobColumn

TOKENS, LOG_PROBS = "target_top_ids", "target_top_log_probs"


@dataclass(frozen=True)
class SoftLabels:
    token_ids: Tensor
    """(S, P) int64."""
    log_probs: Tensor
    """(S, P) float32, nats."""


def soft_columns(num_kept: int) -> tuple[BlobColumn, ...]:
    """Columns `encode_soft` fills; none for 0. Zeros of the prompt compress away."""
    if num_kept == 0:
        return ()
    return tuple(BlobColumn(name, 4 * num_kept, zstd=True) for name in (TOKENS, LOG_PROBS))


def encode_soft(labels: SoftLabels) -> dict[str, Tensor]:
    """(S, 4 P) uint8 a column, little-endian int32 and float32."""
    return {
        TOKENS: labels.token_ids.to(torch.int32).contiguous().view(torch.uint8),
        LOG_PROBS: labels.log_probs.float().contiguous().view(torch.uint8),
    }


def decode_soft(columns: Mapping[str, Tensor], num_tokens: int, num_kept: int) -> SoftLabels:
    """Raises ValueError if a column is absent or of another width."""
    for column in soft_columns(num_kept):
        wanted = (num_tokens, column.bytes_per_token)
        if column.name not in columns or columns[column.name].shape != wanted:
            raise ValueError(f"column {column.name} is not of shape {wanted}")
    return SoftLabels(
        columns[TOKENS].view(torch.int32).long(), columns[LOG_PROBS].view(torch.float32)
    )
