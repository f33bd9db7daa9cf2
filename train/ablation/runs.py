"""The runs of an ablation: one warm-up a seed, then every variant from its checkpoint, with the base recipe's features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.load import load_config
from configs.schema import Config
from drafter.folder import resolve_checkpoint
from train.ablation.settings import Ablation

WARMUP = "warmup"


@dataclass(frozen=True)
class AblationRun:
    """One training run: a variant, or the warm-up, of one seed."""

    ablation: Ablation
    name: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.ablation.output_dir / "runs" / f"{self.name}-seed{self.seed}"

    @property
    def num_steps(self) -> int:
        """A variant's own where it names some: for comparisons at equal time."""
        if self.name == WARMUP:
            return self.ablation.warmup_steps
        own = [o for o in self.ablation.variants[self.name] if o.startswith("train.steps=")]
        return load_config(self.ablation.recipe, own).train.steps if own else self.ablation.steps

    @property
    def warmup(self) -> AblationRun:
        return AblationRun(self.ablation, WARMUP, self.seed)

    def config(self) -> Config:
        """The recipe of this run. A variant's names its warm-up's checkpoint, which must be there."""
        ablation, steps = self.ablation, self.num_steps
        common = [
            f"run.output_dir={self.folder}",
            f"run.name={self.name}-seed{self.seed}",
            f"run.seed={self.seed}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",  # runs are judged afterwards
            "train.eval_samples=1",
            f"train.checkpoint_every={max(1, steps // 4)}",
            "train.keep_checkpoints=1",
            "train.wandb_project=null",
        ]
        return load_config(ablation.recipe, [*ablation.overrides, *common, *self._own()])

    def _own(self) -> list[str]:
        if self.name == WARMUP:
            # left at full rate: the variants' own decay follows
            plain = ["train.loss=ce", "train.soft_label_share=0"]
            return [*plain, "train.schedule=wsd", "train.lr_decay_fraction=0"]
        start = resolve_checkpoint(self.warmup.folder / "checkpoints", "last")
        return [
            f"train.init_from={start}",
            "train.ce_warmup_fraction=0",
            "train.crossfade_fraction=0",
            *self.ablation.variants[self.name],
        ]

    def share_features(self) -> None:
        """Link the base recipe's corpus (train.shuffle_window reads it) and features into the run's folder.

        Not the features where its extract.folder names them already.
        """
        base = base_config(self.ablation)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("corpus", *(("features",) if base.extract.folder is None else ())):
            link, shared = self.folder / name, (base.run.folder / name).resolve()
            if link.is_symlink() and link.resolve() != shared:
                link.unlink()  # the base recipe's folder is another one now
            if not link.is_symlink():
                link.symlink_to(shared, target_is_directory=True)


def base_config(ablation: Ablation) -> Config:
    return load_config(ablation.recipe, ablation.overrides)


def warmups(ablation: Ablation) -> list[AblationRun]:
    return [AblationRun(ablation, WARMUP, seed) for seed in ablation.seeds]


def variants(ablation: Ablation) -> list[AblationRun]:
    """Seed by seed, so that a stopped ablation has whole seeds."""
    return [
        AblationRun(ablation, name, seed) for seed in ablation.seeds for name in ablation.variants
    ]
