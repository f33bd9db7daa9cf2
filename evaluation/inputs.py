"""What an evaluation reads: feature rows of the test split, the drafter, and the proof that they belong together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.fingerprint import fingerprint, require_equal
from configs.schema import Config
from data.features import FeatureSet, open_features
from data.settings import require_same_data
from drafter.config import DrafterConfig, drafter_config
from drafter.folder import (
    drafter_fingerprint,
    load_drafter,
    read_drafter_config,
    resolve_checkpoint,
)
from drafter.model import Drafter
from drafter.own_head import require_targets_own
from target.head import load_target_head
from target.identity import target_identity


@dataclass(frozen=True)
class DrafterSource:
    """A drafter to evaluate: a folder, or None for a randomly initialised one (losslessness must hold for it too)."""

    folder: Path | None
    config: DrafterConfig
    seed: int

    @property
    def name(self) -> str:
        return f"random, seed {self.seed}" if self.folder is None else str(self.folder)

    def fingerprint(self) -> str:
        """Of configuration and weights."""
        if self.folder is None:
            return fingerprint([asdict(self.config), self.seed])
        return drafter_fingerprint(self.folder)

    def require_target(self, features: FeatureSet) -> None:
        """Raises ValueError if a self-contained folder carries another embedding or head than the features' target."""
        if self.folder is not None:
            require_targets_own(
                self.folder, lambda: load_target_head(features.checked_head(), "cpu", None)
            )

    def load(self, device: torch.device, dtype: torch.dtype) -> Drafter:
        """On `device`, without gradients."""
        if self.folder is not None:
            drafter = load_drafter(self.folder, device, dtype)
        else:
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                drafter = Drafter(self.config).to(device, dtype)
        return drafter.eval().requires_grad_(False)


def random_drafter(config: Config) -> DrafterSource:
    return DrafterSource(None, drafter_config(config), config.run.seed)


def find_drafter(config: Config, folder: Path | None) -> DrafterSource:
    """The drafter in `folder`, or the best checkpoint of the run. Raises ValueError if it does not fit the recipe.

    Its depth and widths may differ from the recipe's (a released drafter is welcome); what ties it to target and
    features may not.
    """
    folder = folder or resolve_checkpoint(config.run.folder / "checkpoints", "best")
    found = read_drafter_config(folder)
    wanted = asdict(drafter_config(config))
    tied = ("hidden_size", "vocab_size", "target_layer_ids", "mask_token_id", "block_size")
    require_equal(
        f"the drafter in {folder}",
        asdict(found),
        {key: wanted[key] for key in tied},
        "give --drafter a folder that fits, or correct the recipe",
    )
    return DrafterSource(folder, found, config.run.seed)


def open_test_features(config: Config) -> FeatureSet:
    """The run's features. Raises if they are missing, of another target or other taps, or have no test rows."""
    folder = config.features_location
    features = open_features(folder)
    require_equal(
        f"the features in {folder}",
        features.settings,
        target_identity(config.target)
        | {"target_layer_ids": list(config.drafter.target_layer_ids)},
        "run `./launch.sh extract` with this recipe, or set the recipe back",
    )
    require_same_data(f"the features in {folder}", features.settings, config.data)
    if not features.of_split("test"):
        raise ValueError(
            f"the features in {folder} have no test rows; raise data.test_fraction or give a source split: test, "
            "then run data and extract again"
        )
    return features
