"""Some rows against a fresh forward of the target: are the stored features still what this target computes?

On the machine and software that made them the same batch gives the same bits. Elsewhere kernels sum in another order: in bfloat16
a token's features then differ by a percent or so, by a hundredth of that in float32, while those of another layer, position or
text differ by as much as they are long. The limits lie between. Legend: S tokens, D taps, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.fingerprint import require_equal
from common.progress import Progress
from configs.schema import Codec, TargetSection
from data.feature_manifest import FeatureManifest, RowEntry
from data.features import FeatureSet
from extract.batches import length_batches
from target.identity import target_identity
from target.load import Target, load_target
from target.taps import forward_with_taps

LIMITS = {"float32": 1e-3, "bfloat16": 0.08}
"""Median over tokens of |stored - fresh| / |fresh|, by the target's dtype. Measured on SmolLM2 (30 layers): 1.2 % between bfloat16
and float32 forwards, 25 % and more for the next layer's output."""
CODEC_LIMITS: dict[Codec, float] = {"fp32": 0.0, "bf16": 0.01, "bf16-planes": 0.01, "fp8": 0.08}
"""What the codec's own rounding adds."""
REMEDY = "verify with the target that made them, or extract again"


@dataclass(frozen=True)
class Compared:
    """One row."""

    entry: RowEntry
    errors: tuple[float, ...]
    """By tap."""
    is_same: bool
    """Bit for bit, of a codec that loses nothing."""
    limit: float

    @property
    def is_good(self) -> bool:
        return all(error <= self.limit for error in self.errors)  # false for NaN

    def __str__(self) -> str:
        errors = ", ".join(f"{error:.3g}" for error in self.errors)
        return (
            f"{self.entry.shard}, row {self.entry.row} (sample {self.entry.sample_id}): the target's features differ from the "
            f"stored ones by {errors} of their length, tap by tap; at most {self.limit} is rounding"
        )


def section_of(settings: dict[str, Any], device_map: str | None) -> TargetSection:
    """The target that a manifest names. Raises KeyError for a manifest without one."""
    return TargetSection(
        model=settings["model"],
        revision=settings["revision"],
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_layers"],
        vocab_size=settings["vocab_size"],
        dtype=settings["target_dtype"],
        attention=settings["attention"],
        chat_template_kwargs=settings["chat_template_kwargs"],
        device_map=device_map,
    )


def load_same_target(
    settings: dict[str, Any], device: torch.device, device_map: str | None
) -> Target:
    """Raises ValueError or FileNotFoundError if the target is not here, or not the one that made the features."""
    section = section_of(settings, device_map)
    require_equal("the features", settings, target_identity(section), REMEDY)
    return load_target(section, device)


def choose(entries: Sequence[RowEntry], count: int, seed: int) -> list[RowEntry]:
    """`count` rows, the same for the same seed, in corpus order."""
    chosen = random.Random(seed).sample(range(len(entries)), min(count, len(entries)))
    return [entries[index] for index in sorted(chosen)]


def compare_rows(
    features: FeatureSet, manifest: FeatureManifest, target: Target, chosen: Sequence[RowEntry]
) -> list[Compared]:
    """Each in the batch that it was extracted in. Raises ValueError if a stored row cannot be read."""
    progress = Progress("compare with the target", len(chosen), "rows")
    found = []
    for entry in chosen:
        found.append(_compare(features, target, entry, _batch_of(features, manifest, entry)))
        progress.advance()
    progress.finish()
    return found


def _batch_of(features: FeatureSet, manifest: FeatureManifest, entry: RowEntry) -> list[RowEntry]:
    """Its companions, longest first; if rows of the shard were quarantined, nearly: then bits may differ, by rounding."""
    settings = manifest.settings
    rows = features.of_shard(entry.shard)
    lengths = [row.num_tokens for row in rows]
    padding = settings.get("max_padding", 1.0)  # absent from before batches were held to one
    batches = length_batches(lengths, settings["batch_tokens"], padding)
    return next([rows[i] for i in batch] for batch in batches if entry.row in batch)


@torch.inference_mode()
def _compare(
    features: FeatureSet, target: Target, entry: RowEntry, batch: Sequence[RowEntry]
) -> Compared:
    lengths = torch.tensor([row.num_tokens for row in batch])
    input_ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(batch):
        input_ids[place, : row.num_tokens] = features.read_input_ids(row)
    output = forward_with_taps(
        target,
        input_ids.to(target.device),
        lengths.to(target.device),
        features.target_layer_ids,
        need_last_hidden=features.layout.num_soft_labels > 0,
    )
    place = next(i for i, row in enumerate(batch) if row.row == entry.row)
    fresh = output.features[place, : entry.num_tokens].cpu()
    stored = features.read(entry).features
    fresh = fresh.to(stored.dtype)
    limit = max(LIMITS[features.settings["target_dtype"]], CODEC_LIMITS[features.layout.codec])
    return Compared(entry, relative_errors(stored, fresh), torch.equal(stored, fresh), limit)


def relative_errors(stored: Tensor, fresh: Tensor) -> tuple[float, ...]:
    """Of each tap, the median over tokens of |stored - fresh| / |fresh|: (S, D, H) both."""
    fresh, stored = fresh.float(), stored.float()
    relative = (stored - fresh).norm(dim=-1) / fresh.norm(dim=-1).clamp_min(1e-30)
    return tuple(relative.median(dim=0).values.tolist())
