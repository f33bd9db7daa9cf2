"""What a training run reads, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.fingerprint import require_equal
from configs.schema import Config
from data.features import FeatureSet, RowEntry, open_features
from data.settings import require_same_data
from train.checkpoint import Checkpoints
from train.open_source import (
    Blocks,
    await_features,
    read_blocks,
    require_rows_of,
)
from train.resume import run_settings


@dataclass(frozen=True)
class Inputs:
    features: FeatureSet
    entries: list[RowEntry]
    """Rows trained on, in corpus order."""
    validation: list[RowEntry]
    settings: dict[str, Any]
    checkpoints: Checkpoints
    blocks: Blocks | None
    """The same rows as a stream follows them, with train.shuffle_window."""


def read_inputs(config: Config) -> Inputs:
    """Raises ValueError or FileNotFoundError, in one line, if features, settings or checkpoints do not fit the recipe."""
    await_features(config)
    features = open_features(config.features_location)
    named = ("model", "revision", "chat_template_kwargs")  # the target's files need not be here
    target = config.target.model_dump(mode="json")
    require_equal(
        f"features in {features.location}",
        {
            "drafter.target_layer_ids": features.target_layer_ids,
            "target.hidden_size": features.hidden_size,
            **{f"target.{key}": features.settings[key] for key in named},
        },
        {
            "drafter.target_layer_ids": config.drafter.target_layer_ids,
            "target.hidden_size": config.target.hidden_size,
            **{f"target.{key}": target[key] for key in named},
        },
        "set it to the same value, or extract again into another run.output_dir",
    )
    require_same_data(f"features in {features.location}", features.settings, config.data)
    if config.train.needs_soft_labels and not features.layout.num_soft_labels:
        raise ValueError(
            f"train.loss={config.train.loss} with train.soft_label_share={config.train.soft_label_share} needs soft labels, "
            f"and the features in {features.location} have none; extract with extract.soft_labels=16 into another run.output_dir"
        )
    if config.train.needs_soft_labels:
        require_equal(
            f"features in {features.location}",
            {f"extract.{key}": value for key, value in features.settings.items()},
            {
                "extract.soft_labels": config.extract.soft_labels,
                "extract.soft_label_temperature": config.extract.soft_label_temperature,
            },
            "set it back, or extract again into another run.output_dir",
        )
    require_rows_of(config, features)
    blocks = read_blocks(config, features)
    entries = blocks.entries if blocks else features.of_split("train")
    if not entries:
        raise ValueError(
            f"{features.location} has no rows of split `train`; lower data.test_fraction or add sources"
        )
    validation = features.of_split("validation")[: config.train.eval_samples]
    return Inputs(
        features,
        entries,
        validation,
        run_settings(config, features.location),
        Checkpoints(
            config.run.folder / "checkpoints",
            config.train.keep_checkpoints,
            judged_on=f"{len(validation)} samples, drafter temperature {config.evaluation.unfitted_temperature:g}",
        ),
        blocks,
    )
