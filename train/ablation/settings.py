"""What an ablation compares: a base recipe, its variants as overrides, seeds, and how held-out prompts are divided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from configs.schema import Fraction, Section


class Ablation(Section):
    recipe: Path
    """The base recipe. All runs read its features; they are made (data, extract) if they are not there."""
    overrides: tuple[str, ...] = ()
    """`section.key=value`, for the features and for every run."""
    output_dir: Path
    warmup_steps: PositiveInt
    """Steps of decayed cross-entropy that all variants of a seed start from."""
    steps: PositiveInt
    """Steps of every variant without a `train.steps` of its own, on its own loss from the second one on."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    variants: dict[str, tuple[str, ...]] = Field(min_length=2)
    """Overrides by name."""
    baseline: str
    """The variant the others are compared with."""
    budgets: tuple[PositiveInt, ...] = (8, 16, 32, 64, 128)
    """Tree budgets replayed; the chain is replayed besides."""
    headline_budget: PositiveInt = 64
    fit_fraction: Fraction = 0.25
    """Share of the held-out rows (validation and test) on which drafter temperatures are fitted."""
    confirm_fraction: Fraction = 0.25
    """Share that nothing reads before `--confirm`."""
    max_prompts: PositiveInt = 400
    """Rows judged, and rows confirmed on, at most."""
    fit_anchors_per_row: PositiveInt = 32
    live_prompts: NonNegativeInt = 0
    """Of the judged prompts, so many are also decoded live, by the chain and by the tree of headline_budget, after the fit: the
    target is loaded for it. 0: none."""
    confirm: tuple[str, ...] = ()
    """Variants that `--confirm` judges; decide on them before you look."""

    @model_validator(mode="after")
    def _check(self) -> Ablation:
        unknown = {self.baseline, *self.confirm} - set(self.variants)
        if unknown:
            raise ValueError(
                f"{min(unknown)!r} is no variant; choose from {', '.join(self.variants)}"
            )
        for name in self.variants:
            if not re.fullmatch(r"\w[\w.+-]*", name):
                raise ValueError(
                    f"{name!r} cannot name a variant: its runs are folders of that name"
                )
        for key, values in (("seeds", self.seeds), ("budgets", self.budgets)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key}={list(values)} has a value twice; list each once")
        if "warmup" in self.variants:
            raise ValueError("a variant cannot be named 'warmup': that is the run they start from")
        if self.headline_budget not in self.budgets:
            raise ValueError(f"headline_budget={self.headline_budget} is not in budgets")
        if self.fit_fraction + self.confirm_fraction >= 1:
            raise ValueError(
                "fit_fraction + confirm_fraction must be below 1: some rows are judged"
            )
        return self

    def only(self, names: Sequence[str]) -> Ablation:
        """The same comparison of fewer variants; the baseline is always one. Raises ValueError for a name it does not have."""
        unknown = [name for name in names if name not in self.variants]
        if unknown:
            raise ValueError(
                f"--only: {unknown[0]!r} is no variant; choose from {', '.join(self.variants)}"
            )
        kept = {self.baseline, *names}
        if len(kept) < 2:
            raise ValueError(f"--only {self.baseline}: name a variant to hold against it")
        return self.model_copy(
            update={
                "variants": {name: v for name, v in self.variants.items() if name in kept},
                "confirm": tuple(name for name in self.confirm if name in kept),
            }
        )


def read_ablation(path: Path) -> Ablation:
    """Raises FileNotFoundError or ValueError in one line."""
    if not path.is_file():
        raise FileNotFoundError(f"no ablation file {path}; see configs/ablation/")
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"{path} is no mapping of settings; see configs/ablation/")
        return Ablation.model_validate(value)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        key = "".join(f"{part}." for part in first["loc"])[:-1]
        raise ValueError(f"{path}: {f'{key}: ' * bool(key)}{message}") from error
