"""What extraction will cost in bytes and hours, from the recipe or the corpus' own lengths; loads no model and no torch."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace

from common.storage import open_storage
from configs.schema import Codec, Config
from data.corpus import CorpusManifest, manifest_path, read_corpus_manifest
from data.lengths import Lengths, corpus_lengths, length_table, stated_lengths
from extract.batches import shard_tokens
from extract.footprint import ASSUMED_GPU, Footprint, footprint

# stored bytes over raw bf16 bytes, measured on real states (python -m bench.codecs); fp8 with its scales
CODEC_RATIO: dict[Codec, float] = {"fp32": 2.0, "bf16": 1.0, "bf16-planes": 0.70, "fp8": 0.502}
# bytes a value in the codec's widest column, and what a row may have there (data/feature_shards.py)
WIDEST_COLUMN: dict[Codec, int] = {"fp32": 4, "bf16": 2, "bf16-planes": 1, "fp8": 1}
MAX_COLUMN_BYTES = 2**31 - 2**16
GPU_COUNTS = (1, 8, 32)
MOST_LOST = 0.8  # of the tokens: a shorter maximum that costs more is no advice


@dataclass(frozen=True)
class ExtractPlan:
    lengths: Lengths | None
    """None: neither a corpus nor the recipe says how much there is."""
    codec: Codec
    num_taps: int
    hidden_size: int
    shard_bytes: int
    tokens_per_s: float | None
    """Of one GPU, as the recipe states it."""
    location: str
    free_bytes: int | None
    """Free where the features go, with what an unfinished extraction has already written there; None: a bucket."""
    num_soft_labels: int = 0
    """Target tokens kept for each response token (extract.soft_labels)."""
    footprint: Footprint | None = None
    held_out_share: float | None = None
    """Of the samples, what is stored when the training rows are streamed or never stored; None: all is stored."""
    ring_bytes: int = 0
    """Budget of the stream beside it (train.stream_bytes)."""

    @property
    def num_samples(self) -> int | None:
        return None if self.lengths is None else self.lengths.num_samples

    @property
    def num_tokens(self) -> int | None:
        return None if self.lengths is None else self.lengths.num_tokens

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
        """On disk at one time."""
        stored = self.stored_bytes(self.codec)
        if stored is None or self.held_out_share is None:
            return stored
        return stored * self.held_out_share + self.ring_bytes

    @property
    def num_shards(self) -> int | None:
        if self.num_tokens is None:
            return None
        return math.ceil(
            self.num_tokens / shard_tokens(self.shard_bytes, raw_bytes_per_token(self))
        )

    @property
    def speed(self) -> float | None:
        """Tokens a second of one GPU: stated, else by the target's size."""
        if self.tokens_per_s is not None:
            return self.tokens_per_s
        return None if self.footprint is None else self.footprint.tokens_per_s

    def hours(self, num_gpus: int) -> float | None:
        if self.num_tokens is None or self.speed is None:
            return None
        return self.num_tokens / self.speed / num_gpus / 3600

    def gb_per_s(self, num_gpus: int) -> float | None:
        """What the disk must take while `num_gpus` extract."""
        if self.speed is None:
            return None
        return self.speed * num_gpus * self.stored_bytes_per_token(self.codec) / 1e9

    @property
    def fits(self) -> bool:
        if self.planned_bytes is None or self.free_bytes is None:
            return True
        return self.planned_bytes <= self.free_bytes

    def would_fit(self) -> list[str]:
        """Changes that bring the features under the free disk, each alone; empty if even one sample is too much."""
        if self.lengths is None or self.planned_bytes is None or self.free_bytes is None:
            return []
        if self.held_out_share is not None:
            held_out = self.planned_bytes - self.ring_bytes
            is_ring = self.ring_bytes > 0 and held_out < self.free_bytes
            return ["a smaller train.stream_bytes"] if is_ring else []
        options = [
            f"extract.codec={codec} ({format_bytes(stored)})"
            for codec in CODEC_RATIO
            if (stored := self.stored_bytes(codec)) is not None
            and stored <= self.free_bytes
            and codec != self.codec
        ]
        per_tap = (
            self.stored_bytes_per_token(self.codec) - self.soft_bytes_per_token
        ) / self.num_taps
        room = self.free_bytes / self.lengths.num_tokens - self.soft_bytes_per_token
        if (taps := math.floor(room / per_tap)) > 0:
            options.append(f"{taps} of {self.num_taps} drafter.target_layer_ids")
        options += self._shorter(self.codec)
        if self.codec != "fp8" and not any("fp8" in option for option in options):
            options += self._shorter("fp8")
        if samples := math.floor(self.lengths.num_samples * self.free_bytes / self.planned_bytes):
            options.append(f"{samples:,} samples (data.sources[].take)")
        return options

    def _shorter(self, codec: Codec) -> list[str]:
        """The largest data.max_tokens that fits, by the histogram."""
        assert self.lengths is not None
        assert self.free_bytes is not None
        longest = self.lengths.longest_cut(self.free_bytes / self.stored_bytes_per_token(codec))
        if longest == 0:
            return []
        samples, tokens = self.lengths.share_above(longest)
        if tokens > MOST_LOST:
            return []
        also = "" if codec == self.codec else f"extract.codec={codec} with "
        cost = f"cuts {samples:.0%} of the samples short, {tokens:.0%} of the tokens are lost"
        return [f"{also}data.max_tokens={longest} ({cost})"]

    def require_disk(self) -> None:
        """Raises ValueError with what would fit if the features are larger than the free disk."""
        if self.fits or self.planned_bytes is None or self.free_bytes is None:
            return
        options = "; or ".join(self.would_fit()) or "no smaller setting"
        raise ValueError(
            f"features need {format_bytes(self.planned_bytes)} and {self.location} has {format_bytes(self.free_bytes)} free; "
            f"what would fit: {options}; --ignore-disk starts anyway"
        )

    def lines(self) -> list[str]:
        """The plan as text, a fact a line."""
        return [*self._size_lines(), *self._time_lines(), *self._memory_lines(), self._disk_line()]

    def _size_lines(self) -> list[str]:
        raw = f"{self.num_taps} taps x {self.hidden_size} x 2 B = {self.bytes_per_token:,} bytes a token raw (bf16)"
        if self.lengths is None:
            return [f"samples: unknown: {UNKNOWN_SIZE}", f"features: {raw}"]
        sizes = ", ".join(
            f"{codec} {format_bytes(self.stored_bytes(codec) or 0)}"
            + (" (this recipe)" if codec == self.codec else "")
            for codec in CODEC_RATIO
        )
        return [
            f"samples: {self.num_samples:,} with {self.num_tokens:,} tokens, {self.lengths.mean:,.0f} a sample "
            f"({self.lengths.basis})",
            *self._length_lines(self.lengths),
            f"features: {raw}",
            *self._soft_lines(),
            f"{'on disk' if self.held_out_share is None else 'all of it'}: {sizes}",
            *self._stream_lines(),
            f"shards: about {self.num_shards:,} of {format_bytes(self.shard_bytes)} raw (extract.shard_bytes)",
        ]

    def _length_lines(self, lengths: Lengths) -> list[str]:
        if lengths.num_samples == 0:
            return []
        named = ", ".join(
            f"{share:.0%} {lengths.quantile(share):,.0f}" for share in (0.1, 0.5, 0.9, 0.99)
        )
        return [
            f"lengths: {named}, longest {lengths.longest:,}",
            *length_table(lengths),
        ]

    def _stream_lines(self) -> list[str]:
        if self.held_out_share is None:
            return []
        ring = (
            f" and a ring of {format_bytes(self.ring_bytes)} (train.stream_bytes)"
            if self.ring_bytes
            else ""
        )
        return [
            f"on disk at one time: {format_bytes(self.planned_bytes or 0)}: the held-out rows{ring}; training rows are computed "
            "again in every epoch"
        ]

    def _soft_lines(self) -> list[str]:
        if not self.num_soft_labels:
            return []
        return [
            f"soft labels: {self.num_soft_labels} target tokens x 8 B = {self.soft_bytes_per_token:,} bytes a token at most "
            "(extract.soft_labels); the target's layers above the last tap and its head run too"
        ]

    def _time_lines(self) -> list[str]:
        if self.speed is None:
            return [
                "hours: unknown: measure with a small extract on one GPU (its progress lines say tokens/s), then set "
                "extract.tokens_per_s; target.num_parameters gives an estimate"
            ]
        basis = "extract.tokens_per_s" if self.tokens_per_s else f"a guess: {ASSUMED_GPU}"
        lines = [f"speed: {self.speed:,.0f} tokens/s a GPU ({basis})"]
        for num_gpus in GPU_COUNTS:
            hours = self.hours(num_gpus)
            took = "" if hours is None else f"{hours:,.1f} h, "
            lines.append(f"  {num_gpus} GPU: {took}writing {self.gb_per_s(num_gpus):.3g} GB/s")
        return lines

    def _memory_lines(self) -> list[str]:
        found = self.footprint
        if found is None:
            return ["memory of a rank: unknown: set target.num_parameters"]
        gpu = f"a GPU of {found.gpu_gb} GB" if found.gpu_gb else (
            f"{found.num_gpus()} GPUs of 80 GB together (target.device_map=auto)"
        )  # fmt: skip
        return [
            f"memory of a rank (estimate): {format_bytes(found.device)}: weights {format_bytes(found.weights)} "
            f"({found.basis}), taps {format_bytes(found.taps)}, a layer at work {format_bytes(found.layer)}, logits "
            f"{format_bytes(found.head)}: {gpu}",
            f"host memory of a rank: up to {format_bytes(found.host)} of shards on their way to disk",
        ]

    def _disk_line(self) -> str:
        if self.free_bytes is None:
            return f"disk: {self.location} is a bucket: no limit known here"
        free = f"disk: {format_bytes(self.free_bytes)} free for {self.location}"
        if self.planned_bytes is None:
            return free
        if self.fits:
            return f"{free}: fits"
        return f"{free}: DOES NOT FIT; what would: {'; or '.join(self.would_fit()) or 'nothing'}"


UNKNOWN_SIZE = "set data.num_samples and data.expected_tokens, or run data first"


def plan_extract(config: Config, corpus: CorpusManifest | None = None) -> ExtractPlan:
    """The plan for `corpus`, else for the run's finished corpus, else for the size the recipe states.

    Raises ValueError if a sample of data.max_tokens would not fit a row of a shard.
    """
    _require_rows_fit(config)
    location = config.features_location
    plan = ExtractPlan(
        lengths=plan_lengths(config, corpus),
        codec=config.extract.codec,
        num_taps=len(config.drafter.target_layer_ids),
        hidden_size=config.target.hidden_size,
        num_soft_labels=config.extract.soft_labels,
        shard_bytes=config.extract.shard_bytes,
        tokens_per_s=config.extract.tokens_per_s,
        location=location,
        free_bytes=config.extract.free_disk_bytes or free_bytes(location),
        held_out_share=None
        if config.train.source == "shards"
        else config.data.validation_fraction + config.data.test_fraction,
        ring_bytes=config.train.stream_bytes or 0,
    )
    in_memory = max(plan.shard_bytes, config.data.max_tokens * raw_bytes_per_token(plan))
    return replace(plan, footprint=footprint(config, in_memory))


def plan_lengths(config: Config, corpus: CorpusManifest | None = None) -> Lengths | None:
    folder = config.run.folder / "corpus"
    if corpus is None and manifest_path(folder).is_file():
        corpus = read_corpus_manifest(folder)
    if corpus is not None:
        return corpus_lengths(folder, corpus)
    return stated_lengths(config.data)


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


def free_bytes(location: str) -> int | None:
    """Free where features are or will be, counting the shards already there as room for themselves; None for a bucket."""
    folder = open_storage(location).folder
    if folder is None:
        return None
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    written = sum(shard.stat().st_size for shard in folder.glob("shard-*.parquet"))
    return shutil.disk_usage(there).free + written
