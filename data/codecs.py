"""How target features become bytes and come back: four codecs, each a few columns of raw bytes a token.

Legend: S tokens, D taps, H hidden. Bytes are little-endian, C order (token, tap, H). Nothing here knows Parquet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Codec

assert sys.byteorder == "little", "feature shards are little-endian; this machine is not"

FP8_MAX = 448.0  # largest finite float8_e4m3fn; beyond it the cast gives NaN
STEP_VALUES = 2**18  # converted at once: temporaries stay in the cache, measured 5 times as fast
SIGN_AND_SEVEN_BITS = 0x87F0 - 0x10000  # as int16
FLOAT32_TINY = torch.finfo(torch.float32).tiny


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
            return _encode_fp8(features)


def decode(
    columns: Mapping[str, Tensor], num_tokens: int, num_taps: int, hidden_size: int, codec: Codec
) -> Tensor:
    """Features (S, D, H) of `decoded_dtype(codec)`; fp32 and bf16 are views of the columns' own memory.

    Raises ValueError if a column is absent or has another size than (S, bytes_per_token) says.
    """
    shape = (num_tokens, num_taps, hidden_size)
    if codec in ("fp32", "bf16"):
        check_columns(columns, *shape, codec)
        return columns["features"].view(decoded_dtype(codec)).view(shape)
    features = torch.empty(shape, dtype=decoded_dtype(codec))
    decode_into(columns, features, codec)
    return features


def decode_into(columns: Mapping[str, Tensor], out: Tensor, codec: Codec) -> None:
    """Write features into `out`, contiguous (S, D, H) of `decoded_dtype(codec)` on the CPU: pinned memory, a batch's own row.

    No second copy of them is made. Columns of S tokens: slices of a longer row's give its first S. Raises as `decode`.
    """
    shape = (out.shape[0], out.shape[1], out.shape[2])
    assert out.is_contiguous()
    assert out.dtype == decoded_dtype(codec)
    check_columns(columns, *shape, codec)
    match codec:
        case "fp32" | "bf16":
            _bytes(out).copy_(columns["features"])
        case "bf16-planes":
            _join_planes(columns["features_high"], columns["features_low"], out)
        case "fp8":
            _decode_fp8(columns["features"].view(shape), columns["scales"], out)


def check_columns(
    columns: Mapping[str, Tensor], num_tokens: int, num_taps: int, hidden_size: int, codec: Codec
) -> None:
    """Raises ValueError if a column is absent or has another size than (S, bytes_per_token)."""
    for column in blob_columns(codec, num_taps, hidden_size):
        wanted = (num_tokens, column.bytes_per_token)
        if column.name not in columns or columns[column.name].shape != wanted:
            found = tuple(columns[column.name].shape) if column.name in columns else "no column"
            raise ValueError(f"column {column.name} of codec {codec}: {found}, not {wanted}")


def _steps(features: Tensor) -> Iterator[slice]:
    """Tokens of (S, D, H) in slices of about STEP_VALUES values."""
    num_tokens, num_taps, hidden_size = features.shape
    step = max(1, STEP_VALUES // max(1, num_taps * hidden_size))
    return (slice(start, start + step) for start in range(0, num_tokens, step))


def _join_planes(high: Tensor, low: Tensor, out: Tensor) -> None:
    """high, low (S, D H) uint8. In whole 16-bit numbers: byte by byte takes half as long again."""
    for part in _steps(out):
        joined = out[part].view(torch.int16).view(-1, high.shape[1])
        joined.copy_(high[part]).bitwise_left_shift_(8).bitwise_or_(low[part])


def _encode_fp8(features: Tensor) -> dict[str, Tensor]:
    num_tokens, num_taps, _ = features.shape
    values = torch.empty(features.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(num_tokens, num_taps, 1)
    for part in _steps(features):
        wide = features[part].float()
        peak = wide.abs().amax(dim=-1, keepdim=True)  # (n, D, 1)
        scale = torch.where(peak == 0, 1.0, peak / FP8_MAX).clamp_min_(FLOAT32_TINY)
        scales[part] = scale
        values[part] = (wide / scale).clamp_(-FP8_MAX, FP8_MAX)  # not in place: float() may alias
    return {"features": _bytes(values), "scales": _bytes(scales)}


def _decode_fp8(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """values (S, D, H) and scales (S, 4D), both uint8, out (S, D, H). Six times as fast as torch's own cast from float8.

    With its 7 low bits moved to bfloat16's exponent and mantissa, an e4m3 number reads as itself times 2^-120 (biases
    7 and 127), subnormals included; so a multiplication by 2^120 is the whole conversion.
    """
    scale = scales.view(torch.float32).unsqueeze(-1)  # (S, D, 1)
    for part in _steps(out):
        signed = values[part].view(torch.int8).to(torch.int16)  # the sign fills the high byte
        bits = signed.bitwise_left_shift_(4).bitwise_and_(SIGN_AND_SEVEN_BITS)
        out[part] = bits.view(torch.bfloat16).float().mul_(2.0**120).mul_(scale[part])


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).view(len(values), -1)
