"""How target features become bytes and come back: four codecs, each a few columns of raw bytes a token.

Legend: S tokens, D taps, H hidden. Bytes are little-endian, C order (token, tap, H). Nothing here knows Parquet.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Codec

assert sys.byteorder == "little", "feature shards are little-endian; this machine is not"

FP8_MAX = 448.0  # largest finite float8_e4m3fn; beyond it the cast gives NaN


@dataclass(frozen=True)
class BlobColumn:
    name: str
    bytes_per_token: int
    zstd: bool
    """zstd level 1 pays on the bytes with sign and exponent only; mantissa bytes are noise."""


def blob_columns(codec: Codec, num_taps: int, hidden_size: int) -> tuple[BlobColumn, ...]:
    """The columns `encode` fills, with their widths."""
    values = num_taps * hidden_size
    match codec:
        case "fp32":
            return (BlobColumn("features", 4 * values, False),)
        case "bf16":
            return (BlobColumn("features", 2 * values, False),)
        case "bf16-planes":
            return (
                BlobColumn("features_high", values, True),
                BlobColumn("features_low", values, False),
            )
        case "fp8":
            return (
                BlobColumn("features", values, False),
                BlobColumn("scales", 4 * num_taps, False),
            )


def decoded_dtype(codec: Codec) -> torch.dtype:
    """float32 for fp32, bfloat16 for the others."""
    return torch.float32 if codec == "fp32" else torch.bfloat16


def encode(features: Tensor, codec: Codec) -> dict[str, Tensor]:
    """Columns of bytes, (S, bytes_per_token) uint8 each, of features (S, D, H) of any float dtype on the CPU.

    fp32 and the bf16 pair are lossless for features of their dtype; fp8 has one float32 scale per token and tap and
    a relative error of at most 2^-4 a value (2.6 % rms, DESIGN section 4), subnormals aside.
    """
    match codec:
        case "fp32":
            return {"features": _bytes(features.to(torch.float32))}
        case "bf16":
            return {"features": _bytes(features.to(torch.bfloat16))}
        case "bf16-planes":
            pairs = _bytes(features.to(torch.bfloat16)).view(len(features), -1, 2)
            return {
                "features_high": pairs[:, :, 1].contiguous(),
                "features_low": pairs[:, :, 0].contiguous(),
            }
        case "fp8":
            values = features.to(torch.float32)
            peak = values.abs().amax(dim=-1, keepdim=True)  # (S, D, 1)
            scales = torch.where(peak > 0, peak / FP8_MAX, 1.0).clamp_min(
                torch.finfo(torch.float32).tiny
            )
            scaled = (values / scales).clamp(-FP8_MAX, FP8_MAX)
            return {
                "features": _bytes(scaled.to(torch.float8_e4m3fn)),
                "scales": _bytes(scales.squeeze(-1)),
            }


def decode(
    columns: Mapping[str, Tensor], num_tokens: int, num_taps: int, hidden_size: int, codec: Codec
) -> Tensor:
    """Features (S, D, H) of `decoded_dtype(codec)`; fp32 and bf16 are views of the columns' own memory.

    Raises ValueError if a column is absent or has another size than (S, bytes_per_token) says.
    """
    for column in blob_columns(codec, num_taps, hidden_size):
        wanted = (num_tokens, column.bytes_per_token)
        if column.name not in columns or columns[column.name].shape != wanted:
            found = tuple(columns[column.name].shape) if column.name in columns else "no column"
            raise ValueError(f"column {column.name} of codec {codec}: {found}, not {wanted}")
    shape = (num_tokens, num_taps, hidden_size)
    match codec:
        case "fp32":
            return columns["features"].view(torch.float32).view(shape)
        case "bf16":
            return columns["features"].view(torch.bfloat16).view(shape)
        case "bf16-planes":
            pairs = torch.stack([columns["features_low"], columns["features_high"]], dim=-1)
            return pairs.view(torch.bfloat16).view(shape)
        case "fp8":
            values = columns["features"].view(torch.float8_e4m3fn).view(shape)
            scales = columns["scales"].view(torch.float32)  # (S, D)
            return (values.to(torch.float32) * scales.unsqueeze(-1)).to(torch.bfloat16)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).view(len(values), -1)
