"""One feature shard: Parquet, a row a sample, a row group a row, features as blobs of 2,048 tokens.

Blobs, because Parquet has no 16-bit type and element lists read at 0.1 GB/s. A row group a row makes every sample readable
alone. Equal rows give equal bytes. A Parquet page ends at 2 GiB, and pyarrow 26 puts all chunks of a row into one page: so
a column of a row is limited to that (41,941 tokens of 5 x 5120 values in bf16, twice as many in bf16-planes and fp8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from configs.schema import Codec
from data.codecs import (
    BlobColumn,
    blob_columns,
    check_columns,
    decode,
    decode_into,
    decoded_dtype,
    encode,
)
from data.soft_labels import TOKENS, SoftLabels, decode_soft, encode_soft, soft_columns

SHARD_FORMAT, SHARD_VERSION = "dflash-feature-shard", "1"
CHUNK_TOKENS = 2048
MAX_COLUMN_BYTES = 2**31 - 2**16  # of one row; the rest is for the page's levels and lengths
TEXT_COLUMNS = ("sample_id", "source", "task", "split")


@dataclass(frozen=True)
class FeatureRow:
    """One sample as training and evaluation read it."""

    sample_id: str
    source: str
    task: str
    split: str
    input_ids: Tensor
    """(S,) int64."""
    loss_mask: Tensor
    """(S,) bool: which tokens the target generated."""
    features: Tensor
    """(S, D, H); float32 for codec fp32, bfloat16 else."""
    soft_labels: SoftLabels | None = None
    """If the layout has them."""

    def features_into(self, out: Tensor) -> None:
        """Of the first tokens, as many as `out` (n, D, H) holds."""
        out.copy_(self.features[: len(out)])

    @property
    def token_shape(self) -> tuple[int, int]:
        """D, H."""
        return self.features.shape[1], self.features.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype


@dataclass(frozen=True)
class FeatureLayout:
    """What a shard's bytes mean."""

    codec: Codec
    num_taps: int
    hidden_size: int
    num_soft_labels: int = 0
    """Target tokens kept for each response token (data/soft_labels.py); 0: none."""

    @property
    def columns(self) -> tuple[BlobColumn, ...]:
        features = blob_columns(self.codec, self.num_taps, self.hidden_size)
        return features + soft_columns(self.num_soft_labels)


@dataclass(frozen=True)
class StoredRow:
    """A FeatureRow whose features are still in the shard's bytes: decoded once, where they are wanted, and no more than that."""

    sample_id: str
    source: str
    task: str
    split: str
    input_ids: Tensor
    loss_mask: Tensor
    columns: Mapping[str, Tensor]
    """What data/codecs.py decodes, (S, bytes) uint8 each, over the file's own memory."""
    layout: FeatureLayout
    soft_labels: SoftLabels | None = None

    def decoded(self) -> FeatureRow:
        """Features of fp32 and bf16 are views of the columns."""
        num_taps, hidden_size = self.token_shape
        return FeatureRow(
            sample_id=self.sample_id,
            source=self.source,
            task=self.task,
            split=self.split,
            input_ids=self.input_ids,
            loss_mask=self.loss_mask,
            features=decode(
                self.columns, len(self.input_ids), num_taps, hidden_size, self.layout.codec
            ),
            soft_labels=self.soft_labels,
        )

    def features_into(self, out: Tensor) -> None:
        """Of the first tokens, as many as `out` (n, D, H) holds: contiguous, of `dtype`, pinned or a batch's own memory."""
        first = {name: column[: len(out)] for name, column in self.columns.items()}
        decode_into(first, out, self.layout.codec)

    @property
    def token_shape(self) -> tuple[int, int]:
        """D, H."""
        return self.layout.num_taps, self.layout.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return decoded_dtype(self.layout.codec)


def write_shard(path: Path, rows: Sequence[FeatureRow | StoredRow], layout: FeatureLayout) -> None:
    """Write `rows` in their order to `path` (the caller makes it atomic). Features may be of any float dtype; a stored row's
    bytes go over as they are, so that a shard's own rows make the shard again.

    Raises ValueError if a row is too long for a Parquet page.
    """
    schema = _schema(layout)
    zstd = [f"{column.name}.list.element" for column in layout.columns if column.zstd]
    with pq.ParquetWriter(
        path,
        schema,
        use_dictionary=False,
        write_statistics=False,
        compression=dict.fromkeys(zstd, "zstd"),  # pyright: ignore[reportArgumentType]  # str or dict
        compression_level=dict.fromkeys(zstd, 1),
        write_page_checksum=True,
    ) as writer:
        for row in rows:
            writer.write_table(_table(row, layout, schema), row_group_size=1)


def open_shard(source: Path | BinaryIO) -> pq.ParquetFile:
    """Raises pyarrow.ArrowException or OSError if the file is no whole Parquet file."""
    return pq.ParquetFile(source, page_checksum_verification=True)


def check_schema(file: pq.ParquetFile, layout: FeatureLayout) -> None:
    """Raises ValueError if the shard's columns, or what it says of them, are not the layout's."""
    found, wanted = file.schema_arrow, _schema(layout)
    same = [_kind(field) for field in found] == [_kind(field) for field in wanted]
    if not same or not (wanted.metadata or {}).items() <= (found.metadata or {}).items():
        raise ValueError(f"its schema is not that of {SHARD_FORMAT} {SHARD_VERSION}, {layout}")


def _kind(field: pa.Field) -> tuple[str, ...]:
    """Name and type; Parquet has its own names for what is in a list."""
    inner = (str(field.type.value_type),) if pa.types.is_list(field.type) else (str(field.type),)
    return field.name, *inner


def read_row(file: pq.ParquetFile, row: int, layout: FeatureLayout) -> FeatureRow:
    """Row `row` of an open shard; features go from the Parquet buffer to the tensor without element lists.

    Raises ValueError, pyarrow.ArrowException or OSError if the row is not what the layout says.
    """
    return read_stored_row(file, row, layout).decoded()


def read_stored_row(file: pq.ParquetFile, row: int, layout: FeatureLayout) -> StoredRow:
    """`read_row` before its features are decoded; their columns are checked. Raises likewise."""
    table = _row_group(file, row)
    if table.num_rows != 1 or not {*TEXT_COLUMNS, "input_ids", "loss_mask"} <= {
        *table.column_names
    }:
        raise ValueError(f"not a row of {SHARD_FORMAT} {SHARD_VERSION}")
    input_ids = _ids(table)
    blobs = {
        column.name: _blob(table, column.name, len(input_ids))
        for column in layout.columns
        if column.name in table.column_names
    }
    check_columns(blobs, len(input_ids), layout.num_taps, layout.hidden_size, layout.codec)
    sample_id, source, task, split = (table.column(name)[0].as_py() for name in TEXT_COLUMNS)
    return StoredRow(
        sample_id=sample_id,
        source=source,
        task=task,
        split=split,
        input_ids=input_ids,
        loss_mask=torch.from_numpy(
            np.array(_list(table, "loss_mask").to_numpy(zero_copy_only=False))
        ),
        columns=blobs,
        layout=layout,
        soft_labels=decode_soft(blobs, len(input_ids), layout.num_soft_labels)
        if layout.num_soft_labels
        else None,
    )


def read_input_ids(file: pq.ParquetFile, row: int) -> Tensor:
    """(S,) int64 of row `row` of an open shard; its features are not read. Raises as `read_row`."""
    return _ids(_row_group(file, row, ["input_ids"]))


def read_entry_row(file: pq.ParquetFile, row: int) -> dict[str, str | int]:
    """What the set's list of rows says of row `row` of an open shard; its features are not read. Raises as `read_row`."""
    table = _row_group(file, row, [*TEXT_COLUMNS, "input_ids", "loss_mask"])
    return {
        **{name: table.column(name)[0].as_py() for name in TEXT_COLUMNS},
        "num_tokens": len(_list(table, "input_ids")),
        "num_response_tokens": _list(table, "loss_mask").true_count,
    }


def read_soft_token_ids(file: pq.ParquetFile, row: int) -> Tensor:
    """(S, P) int64 of row `row` of an open shard that has soft labels; nothing else is read. Raises as `read_row`."""
    table = _row_group(file, row, ["input_ids", TOKENS])
    return _blob(table, TOKENS, len(_ids(table))).view(torch.int32).long()


def _row_group(file: pq.ParquetFile, row: int, columns: list[str] | None = None) -> pa.Table:
    if file.num_row_groups <= row:
        raise ValueError(f"only {file.num_row_groups} rows")
    return file.read_row_group(row, columns, use_threads=False)


def _ids(table: pa.Table) -> Tensor:
    return torch.from_numpy(_list(table, "input_ids").to_numpy().astype(np.int64))


def _schema(layout: FeatureLayout) -> pa.Schema:
    return pa.schema(
        [
            *((name, pa.string()) for name in TEXT_COLUMNS),
            ("num_tokens", pa.int32()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            *((column.name, pa.list_(pa.large_binary())) for column in layout.columns),
        ],
        metadata={
            "format": SHARD_FORMAT,
            "version": SHARD_VERSION,
            "codec": layout.codec,
            "num_taps": str(layout.num_taps),
            "hidden_size": str(layout.hidden_size),
            "chunk_tokens": str(CHUNK_TOKENS),
            **({"num_soft_labels": str(layout.num_soft_labels)} if layout.num_soft_labels else {}),
        },
    )


def _table(row: FeatureRow | StoredRow, layout: FeatureLayout, schema: pa.Schema) -> pa.Table:
    num_tokens = len(row.input_ids)
    assert row.token_shape == (layout.num_taps, layout.hidden_size)
    assert len(row.loss_mask) == num_tokens
    widest = max(column.bytes_per_token for column in layout.columns)
    if num_tokens * widest > MAX_COLUMN_BYTES:
        raise ValueError(
            f"sample {row.sample_id} has {num_tokens} tokens; in codec {layout.codec} a row holds at most "
            f"{MAX_COLUMN_BYTES // widest}: lower data.max_tokens or use another extract.codec"
        )
    columns = {
        "sample_id": pa.array([row.sample_id]),
        "source": pa.array([row.source]),
        "task": pa.array([row.task]),
        "split": pa.array([row.split]),
        "num_tokens": pa.array([num_tokens], pa.int32()),
        "input_ids": _one_list(pa.array(row.input_ids.numpy().astype(np.int32))),
        "loss_mask": _one_list(pa.array(row.loss_mask.numpy())),
    }
    for name, blob in _blobs(row, layout).items():
        columns[name] = _one_list(_chunks(blob))
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _blobs(row: FeatureRow | StoredRow, layout: FeatureLayout) -> Mapping[str, Tensor]:
    if isinstance(row, StoredRow):
        assert row.layout == layout
        return row.columns
    num_tokens = len(row.input_ids)
    assert len(row.features) == num_tokens
    blobs = encode(row.features, layout.codec)
    if layout.num_soft_labels:
        assert row.soft_labels is not None
        assert row.soft_labels.token_ids.shape == (num_tokens, layout.num_soft_labels)
        blobs |= encode_soft(row.soft_labels)
    return blobs


def _chunks(blob: Tensor) -> pa.Array:
    """(S, bytes) uint8 as large_binary values of 2,048 tokens, sharing the tensor's memory."""
    num_tokens, width = blob.shape
    offsets = np.array([*range(0, num_tokens, CHUNK_TOKENS), num_tokens], dtype=np.int64) * width
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        len(offsets) - 1,
        [None, pa.py_buffer(offsets), pa.py_buffer(blob.numpy())],
    )


def _one_list(values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _list(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    if column.num_chunks != 1 or column.null_count:
        raise ValueError(f"column {name} holds no value")
    return column.chunk(0).flatten()


def _blob(table: pa.Table, name: str, num_tokens: int) -> Tensor:
    """The blobs of a list<large_binary> column as one (S, bytes) uint8 tensor over Arrow's own memory."""
    chunks = _list(table, name)
    if not pa.types.is_large_binary(chunks.type) or len(chunks) == 0:
        raise ValueError(f"column {name} is no list of blobs")
    _, offsets, data = chunks.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64)[chunks.offset : chunks.offset + len(chunks) + 1]
    size = int(bounds[-1] - bounds[0])
    if num_tokens == 0 or size % num_tokens:
        raise ValueError(f"column {name} has {size} bytes for {num_tokens} tokens")
    flat = pa.Array.from_buffers(
        pa.uint8(), size, [None, data.slice(int(bounds[0]), size)]
    )  # dlpack takes Arrow memory without a copy or a warning about read-only buffers
    return torch.from_dlpack(flat).view(num_tokens, -1)
