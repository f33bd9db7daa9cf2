"""What each codec costs and saves on a target's real states: GB/s of one core, bytes over raw bf16, error.

    python -m bench.codecs [--features outputs/demo/features] [--tokens 6000] [--output outputs/bench/codecs.json]

GB are those of the raw bf16 features, whatever the codec stores, and seconds are processor time of all threads, so a busy
machine hardly disturbs them. `write` is a whole shard (encode, zstd, checksums, Parquet) and `read` the way back into a buffer
that is there already, as the trainer's batch is, from the page cache; `decode` is the codec's part of that, decompression included, and
`encode` its part of writing, without compression.
Codecs alternate in one process, medians of rounds. Then the same for the compression of the high plane alone, by method: why it
is zstd at level 1. Some 20 seconds.

Bars: decode at least 1 GB/s for bf16 and 0.5 for the others; bf16-planes at most 0.75 of raw.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from common.files import write_json
from configs.schema import Codec
from data.codecs import decode_into, decoded_dtype, encode
from data.feature_shards import (
    FeatureLayout,
    FeatureRow,
    open_shard,
    read_stored_row,
    write_shard,
)
from data.features import FeatureSet, open_features

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "bf16-planes", "fp8")
DECODE_BAR: dict[Codec, float] = {"fp32": 0.5, "bf16": 1.0, "bf16-planes": 0.5, "fp8": 0.5}
PLANES_BAR = 0.75
METHODS: tuple[tuple[str, int | None], ...] = (
    ("zstd", -1),
    ("zstd", 1),
    ("zstd", 3),
    ("lz4", None),
)


@dataclass(frozen=True)
class Row:
    codec: Codec
    ratio: float
    """Bytes of the shard over raw bf16."""
    write_gb_per_s: float
    read_gb_per_s: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    rms_error: float
    """Over the features' rms."""
    decode_bar_gb_per_s: float
    meets_bars: bool


@dataclass(frozen=True)
class Method:
    method: str
    ratio: float
    """Of bf16-planes as a whole, were its high plane compressed so."""
    compress_gb_per_s: float
    decompress_gb_per_s: float


ZSTD = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True)
class Packed:
    """A column's bytes, compressed or not."""

    plain: Tensor
    data: pa.Buffer | None

    @classmethod
    def of(cls, column: Tensor, is_compressed: bool) -> Packed:
        data = ZSTD.compress(pa.py_buffer(column.numpy())) if is_compressed else None
        return cls(column, data)

    def unpacked(self) -> Tensor:
        if self.data is None:
            return self.plain
        buffer = ZSTD.decompress(self.data, self.plain.numel())
        flat = pa.Array.from_buffers(pa.uint8(), self.plain.numel(), [None, buffer])
        return torch.from_dlpack(flat).view(self.plain.shape)


@dataclass(frozen=True)
class Case:
    """One codec's work on the same rows."""

    codec: Codec
    layout: FeatureLayout
    rows: Sequence[FeatureRow]
    file: Path

    def write(self) -> None:
        write_shard(self.file, self.rows, self.layout)

    def read(self, out: Tensor) -> None:
        """Every row into the buffer's first tokens."""
        with open_shard(self.file) as shard:
            for index, row in enumerate(self.rows):
                stored = read_stored_row(shard, index, self.layout)
                stored.features_into(out[: len(row.input_ids)])

    def encode(self) -> list[dict[str, Tensor]]:
        return [encode(row.features, self.codec) for row in self.rows]

    def packed(self) -> list[dict[str, Packed]]:
        """As it is stored: columns that are compressed, compressed."""
        zstd = {column.name for column in self.layout.columns if column.zstd}
        return [
            {name: Packed.of(column, name in zstd) for name, column in columns.items()}
            for columns in self.encode()
        ]

    def decode(self, packed: Sequence[dict[str, Packed]], out: Tensor) -> None:
        for columns, row in zip(packed, self.rows, strict=True):
            plain = {name: column.unpacked() for name, column in columns.items()}
            decode_into(plain, out[: len(row.input_ids)], self.codec)


def first_rows(features: FeatureSet, num_tokens: int) -> list[FeatureRow]:
    rows, held = [], 0
    for entry in features.entries:
        row = features.read(entry)
        rows.append(replace(row, features=row.features.clone()))
        held += entry.num_tokens
        if held >= num_tokens:
            break
    return rows


def measure(features: FeatureSet, num_tokens: int, rounds: int) -> tuple[list[Row], list[Method]]:
    rows = first_rows(features, num_tokens)
    raw_bytes = sum(2 * row.features.numel() for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            Case(codec, replace(features.layout, codec=codec, num_soft_labels=0), rows, Path(folder, codec))
            for codec in CODECS
        ]  # fmt: skip
        work = [steps_of(case) for case in cases]
        seconds = alternate([step for steps in work for step in steps], rounds)
        found = []
        for index, case in enumerate(cases):
            speeds = [raw_bytes / 1e9 / s for s in seconds[4 * index : 4 * index + 4]]
            found.append(row_of(case, raw_bytes, speeds))
    return found, methods_of(rows, raw_bytes, rounds)


def steps_of(case: Case) -> list[Callable[[], object]]:
    longest = max(len(row.input_ids) for row in case.rows)
    out = torch.empty(longest, *case.rows[0].token_shape, dtype=decoded_dtype(case.codec))
    packed = case.packed()
    return [case.write, lambda: case.read(out), case.encode, lambda: case.decode(packed, out)]


def row_of(case: Case, raw_bytes: int, speeds: Sequence[float]) -> Row:
    write, read, encoding, decoding = speeds
    ratio, bar = case.file.stat().st_size / raw_bytes, DECODE_BAR[case.codec]
    good = decoding >= bar and (case.codec != "bf16-planes" or ratio <= PLANES_BAR)
    return Row(case.codec, ratio, write, read, encoding, decoding, rms_error(case), bar, good)


def rms_error(case: Case) -> float:
    wrong, power = 0.0, 0.0
    with open_shard(case.file) as shard:
        for index, row in enumerate(case.rows):
            found = read_stored_row(shard, index, case.layout).decoded().features.double()
            wanted = row.features.double()
            wrong += float((found - wanted).square().sum())
            power += float(wanted.square().sum())
    return (wrong / power) ** 0.5


def methods_of(rows: Sequence[FeatureRow], raw_bytes: int, rounds: int) -> list[Method]:
    high = torch.cat([encode(row.features, "bf16-planes")["features_high"] for row in rows])
    plain = pa.py_buffer(high.numpy())
    found = []
    for name, level in METHODS:
        codec = pa.Codec(name, compression_level=level)
        packed = codec.compress(plain)
        steps = (lambda c=codec: c.compress(plain), lambda c=codec, p=packed: c.decompress(p, plain.size))  # fmt: skip
        compress, decompress = (raw_bytes / 1e9 / s for s in alternate(steps, rounds))
        label = name if level is None else f"{name} {level}"
        found.append(Method(label, (packed.size + plain.size) / raw_bytes, compress, decompress))
    return found


def alternate(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median processor seconds of each step; every round runs all of them once, the first is not counted."""
    seconds: list[list[float]] = [[] for _ in steps]
    for counted in range(rounds + 1):
        for taken, step in zip(seconds, steps, strict=True):
            start = time.process_time()
            step()
            if counted:
                taken.append(time.process_time() - start)
    return [statistics.median(taken) for taken in seconds]


def print_table(rows: Sequence[Row], methods: Sequence[Method], what: str) -> None:
    print(f"{what}\nGB/s of one core; GB of raw bf16")
    print(
        f"{'codec':<13}{'ratio':>7}{'write':>7}{'read':>7}{'encode':>8}{'decode':>8}{'error':>9}  bars"
    )
    for row in rows:
        bars = f"decode {row.decode_bar_gb_per_s}" + (
            f", ratio {PLANES_BAR}" if row.codec == "bf16-planes" else ""
        )
        print(
            f"{row.codec:<13}{row.ratio:>7.3f}{row.write_gb_per_s:>7.2f}{row.read_gb_per_s:>7.2f}"
            f"{row.encode_gb_per_s:>8.2f}{row.decode_gb_per_s:>8.2f}{row.rms_error:>9.1e}  {bars}: "
            + ("met" if row.meets_bars else "MISSED")
        )
    print(f"\n{'high plane':<13}{'ratio':>7}{'compress':>10}{'decompress':>12}")
    for method in methods:
        print(
            f"{method.method:<13}{method.ratio:>7.3f}{method.compress_gb_per_s:>10.2f}{method.decompress_gb_per_s:>12.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.codecs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--features", default="outputs/demo/features", help="a features folder")
    parser.add_argument("--tokens", type=int, default=6000, help="of its first rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/codecs.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    features = open_features(options.features)
    rows, methods = measure(features, options.tokens, options.rounds)
    what = (
        f"{features.settings['model']}, {features.layout.num_taps} taps of {features.hidden_size}, "
        f"rows of {features.location} stored as {features.layout.codec}"
    )
    print_table(rows, methods, what)
    write_json(
        options.output,
        {
            "name": "codecs",
            "machine": f"{platform.machine()}, torch {torch.__version__}, pyarrow {pa.__version__}",
            "states": what,
            "rows": [asdict(row) for row in rows],
            "high_plane": [asdict(method) for method in methods],
        },
    )


if __name__ == "__main__":
    main()
