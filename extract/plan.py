"""What extraction will cost in bytes and hours, from the recipe or the corpus manifest; loads no model and no torch."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Codec, Config
from data.corpus import CorpusManifest, manifest_path, read_corpus_manifest
from extract.batches import shard_tokens

# stored bytes over raw bf16 bytes, measured on real states (DESIGN section 4); fp8 with its scales
CODEC_RATIO: dict[Codec, float] = {"fp32": 2.0, "bf16": 1.0, "bf16-planes": 0.70, "fp8": 0.502}
# bytes a value in the codec's widest column, and what a row may have there (data/feature_shards.py)
WIDEST_COLUMN: dict[Codec, int] = {"fp32": 4, "bf16": 2, "bf16-planes": 1, "fp8": 1}
MAX_COLUMN_BYTES = 2**31 - 2**16
GPU_COUNTS = (1, 8, 32)


@dataclass(frozen=True)
class ExtractPlan:
    num_samples: int | None
    """None: neither a corpus nor data.num_samples says it."""
    num_tokens: int | None
    basis: str
    """Where the two numbers come from."""
    codec: Codec
    num_taps: int
    hidden_size: int
    shard_bytes: int
    tokens_per_s: float | None
    """Of one GPU."""
    folder: Path
    free_bytes: int
    """Free where the features go, with what an unfinished extraction has already written there."""
    num_soft_labels: int = 0
    """Target tokens kept for each response token (extract.soft_labels)."""

    @property
    def bytes_per_token(self) -> int:
        """Raw bf16 features of one token: taps x hidden x 2."""
        return self.num_taps * self.hidden_size * 2

    @property
    def soft_bytes_per_token(self) -> int:
        """A token id and a log-prob each, at most: those of the prompt compress away."""
        return 8 * self.num_soft_labels

    def stored_bytes_per_token(self, codec: Codec) -> float:
        features = CODEC_RATIO[codec] * self.bytes_per_token
        if codec == "fp8":  # in a tiny target the scales weigh more
            features = max(features, self.num_taps * (self.hidden_size + 4))
        return features + self.soft_bytes_per_token

    def stored_bytes(self, codec: Codec) -> float | None:
        if self.num_tokens is None:
            return None
        return self.num_tokens * self.stored_bytes_per_token(codec)

    @property
    def planned_bytes(self) -> float | None:
        return self.stored_bytes(self.codec)

    @property
    def num_shards(self) -> int | None:
        if self.num_tokens is None:
            return None
        return math.ceil(
            self.num_tokens / shard_tokens(self.shard_bytes, raw_bytes_per_token(self))
        )

    def hours(self, num_gpus: int) -> float | None:
        if self.num_tokens is None or self.tokens_per_s is None:
            return None
        return self.num_tokens / self.tokens_per_s / num_gpus / 3600

    def gb_per_s(self, num_gpus: int) -> float | None:
        """What the disk must take while `num_gpus` extract."""
        if self.tokens_per_s is None:
            return None
        return self.tokens_per_s * num_gpus * self.stored_bytes_per_token(self.codec) / 1e9

    @property
    def fits(self) -> bool:
        return self.planned_bytes is None or self.planned_bytes <= self.free_bytes

    def would_fit(self) -> list[str]:
        """Changes that bring the features under the free disk, each alone; empty if even one sample is too much."""
        if self.num_tokens is None or self.num_samples is None or self.planned_bytes is None:
            return []
        options = [
            f"extract.codec={codec} ({format_bytes(stored)})"
            for codec in CODEC_RATIO
            if (stored := self.stored_bytes(codec)) is not None
            and stored <= self.free_bytes
            and codec != self.codec
        ]
        share = self.free_bytes / self.planned_bytes
        if taps := math.floor(self.num_taps * share):
            options.append(f"{taps} of {self.num_taps} drafter.target_layer_ids")
        if tokens := math.floor(self.num_tokens / self.num_samples * share):
            options.append(f"data.max_tokens so low that a sample has {tokens:,} tokens on average")
        if samples := math.floor(self.num_samples * share):
            options.append(f"{samples:,} samples (data.sources[].take)")
        return options

    def require_disk(self) -> None:
        """Raises ValueError with what would fit if the features are larger than the free disk."""
        if self.fits or self.planned_bytes is None:
            return
        options = "; or ".join(self.would_fit()) or "no smaller setting"
        raise ValueError(
            f"features need {format_bytes(self.planned_bytes)} and {self.folder} has {format_bytes(self.free_bytes)} free; "
            f"what would fit: {options}; --ignore-disk starts anyway"
        )

    def lines(self) -> list[str]:
        """The plan as text, a fact a line."""
        return [*self._size_lines(), *self._time_lines(), self._disk_line()]

    def _size_lines(self) -> list[str]:
        raw = f"{self.num_taps} taps x {self.hidden_size} x 2 B = {self.bytes_per_token:,} bytes a token raw (bf16)"
        if self.num_tokens is None or self.num_samples is None:
            return [f"samples: unknown: {self.basis}", f"features: {raw}"]
        mean = self.num_tokens / max(self.num_samples, 1)
        sizes = ", ".join(
            f"{codec} {format_bytes(self.num_tokens * self.stored_bytes_per_token(codec))}"
            + (" (this recipe)" if codec == self.codec else "")
            for codec in CODEC_RATIO
        )
        return [
            f"samples: {self.num_samples:,} with {self.num_tokens:,} tokens, {mean:,.0f} a sample ({self.basis})",
            f"features: {raw}",
            *self._soft_lines(),
            f"on disk: {sizes}",
            f"shards: about {self.num_shards:,} of {format_bytes(self.shard_bytes)} raw (extract.shard_bytes)",
        ]

    def _soft_lines(self) -> list[str]:
        if not self.num_soft_labels:
            return []
        return [
            f"soft labels: {self.num_soft_labels} target tokens x 8 B = {self.soft_bytes_per_token:,} bytes a token at most "
            "(extract.soft_labels); the target's layers above the last tap and its head run too"
        ]

    def _time_lines(self) -> list[str]:
        if self.tokens_per_s is None:
            return [
                "hours: unknown: measure with a small extract on one GPU (its progress lines say tokens/s), then "
                "set extract.tokens_per_s"
            ]
        lines = [f"speed: {self.tokens_per_s:,.0f} tokens/s a GPU (extract.tokens_per_s)"]
        for num_gpus in GPU_COUNTS:
            hours = self.hours(num_gpus)
            took = "" if hours is None else f"{hours:,.1f} h, "
            lines.append(f"  {num_gpus} GPU: {took}writing {self.gb_per_s(num_gpus):.3g} GB/s")
        return lines

    def _disk_line(self) -> str:
        free = f"disk: {format_bytes(self.free_bytes)} free for {self.folder}"
        if self.planned_bytes is None:
            return free
        if self.fits:
            return f"{free}: fits"
        return f"{free}: DOES NOT FIT; what would: {'; or '.join(self.would_fit()) or 'nothing'}"


def plan_extract(config: Config, corpus: CorpusManifest | None = None) -> ExtractPlan:
    """The plan for `corpus`, else for the run's finished corpus, else for the size the recipe states.

    Raises ValueError if a sample of data.max_tokens would not fit a row of a shard.
    """
    _require_rows_fit(config)
    data, folder = config.data, config.run.folder / "features"
    corpus_folder = config.run.folder / "corpus"
    if corpus is None and manifest_path(corpus_folder).is_file():
        corpus = read_corpus_manifest(corpus_folder)
    if corpus is not None:
        num_samples, num_tokens, basis = corpus.num_rows, corpus.num_tokens, "from the corpus"
    elif data.num_samples is not None and data.expected_tokens is not None:
        num_samples, num_tokens = data.num_samples, data.num_samples * data.expected_tokens
        basis = "data.num_samples x data.expected_tokens"
    else:
        num_samples = num_tokens = None
        basis = "set data.num_samples and data.expected_tokens, or run data first"
    return ExtractPlan(
        num_samples=num_samples,
        num_tokens=num_tokens,
        basis=basis,
        codec=config.extract.codec,
        num_taps=len(config.drafter.target_layer_ids),
        hidden_size=config.target.hidden_size,
        num_soft_labels=config.extract.soft_labels,
        shard_bytes=config.extract.shard_bytes,
        tokens_per_s=config.extract.tokens_per_s,
        folder=folder,
        free_bytes=config.extract.free_disk_bytes or _free_bytes(folder),
    )


def max_row_tokens(codec: Codec, num_taps: int, hidden_size: int) -> int:
    """Tokens of the longest sample that a feature shard can hold."""
    return MAX_COLUMN_BYTES // (WIDEST_COLUMN[codec] * num_taps * hidden_size)


def raw_bytes_per_token(plan: ExtractPlan) -> int:
    """What extract.shard_bytes counts: features as they are decoded, 4 bytes a value for fp32, 2 else."""
    return plan.bytes_per_token * (2 if plan.codec == "fp32" else 1)


def format_bytes(num_bytes: float) -> str:
    """Decimal units: `46.9 TB`, `32.0 MB`."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _require_rows_fit(config: Config) -> None:
    limit = max_row_tokens(
        config.extract.codec, len(config.drafter.target_layer_ids), config.target.hidden_size
    )
    if config.data.max_tokens > limit:
        raise ValueError(
            f"data.max_tokens={config.data.max_tokens}: a row of extract.codec={config.extract.codec} holds at most {limit} "
            "tokens (a Parquet page ends at 2 GiB); lower it, use a narrower codec, or fewer drafter.target_layer_ids"
        )


def _free_bytes(folder: Path) -> int:
    """Free where `folder` is or will be, counting the shards already there as room for themselves."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    written = sum(shard.stat().st_size for shard in folder.glob("shard-*.parquet"))
    return shutil.disk_usage(there).free + written
