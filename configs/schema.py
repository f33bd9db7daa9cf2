"""The whole run as typed, frozen sections. A default is the recommended run; every field says its unit and effect.

Relations between fields are checked here, before any model loads. `python -c "import configs.schema"` loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.data_section import (
    Bounds,
    DataSection,
    ResponsesSection,
    ServerSection,
    SourceSection,
)
from configs.model_sections import (
    DrafterSection,
    HybridTarget,
    TargetSection,
    TinyTarget,
    WheelTarget,
)
from configs.section import Dtype, Fraction, Section, TreeBudget
from configs.train_section import (
    LOSS_NAMES,
    SOFT_LOSSES,
    TREE_LOSSES,
    WALK_LOSSES,
    LossName,
    TrainSection,
)

__all__ = [
    "LOSS_NAMES",
    "SOFT_LOSSES",
    "TREE_LOSSES",
    "WALK_LOSSES",
    "AcceptorName",
    "Bounds",
    "Codec",
    "Config",
    "DataSection",
    "DrafterSection",
    "Dtype",
    "EvaluationSection",
    "ExportSection",
    "ExtractSection",
    "Fraction",
    "HybridTarget",
    "LossName",
    "ResponsesSection",
    "RunSection",
    "Section",
    "ServerSection",
    "SourceSection",
    "TargetSection",
    "TinyTarget",
    "TrainSection",
    "TreeBudget",
    "WheelTarget",
]


Codec = Literal["fp32", "bf16", "bf16-planes", "fp8"]
AcceptorName = Literal["chain", "chain_rejection", "tree", "tree_spine", "tree_cost"]
NUM_SOFT_LABELS = 32
"""Of `extract.soft_labels: true`."""


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Recipe name; the run's folder and its W&B run carry it."""
    output_dir: Path | None = None
    """Folder of the run; default `outputs/<name>`."""
    seed: int = Field(default=0, ge=0)
    """Seeds corpus order, sampling, anchors and initialisation."""
    cpu_threads: PositiveInt = 1
    """Torch threads of a rank on CPU. Part of the result: CPU kernels may round differently with another number."""

    @property
    def folder(self) -> Path:
        return self.output_dir or Path("outputs") / self.name


class ExtractSection(Section):
    folder: str | None = None
    """Where the features are: a path, `s3://bucket/prefix` or `gs://bucket/prefix` (docs/streaming.md). null: `features/` in
    the run's folder."""
    codec: Codec = "bf16-planes"
    """bf16-planes is lossless for bf16 states; fp32 is for exact comparisons; fp8 halves bf16 (2.6 % rms error on normal values)."""
    shard_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Raw feature bytes a shard aims at, before compression."""
    batch_tokens: PositiveInt = 16_384
    """Padded tokens a target forward."""
    max_padding: Fraction = 0.05
    """A row joins a batch while padding is at most this share of it (or the batch is below a sixteenth of batch_tokens); 1:
    batches are filled up to batch_tokens."""
    writers: PositiveInt = 2
    """Threads of a worker that encode, compress and store shards; each holds one. More for a bucket that answers slowly."""
    lease_s: float = Field(default=60.0, gt=0)
    """A worker on another machine that was silent for so long is taken for dead, and its shards are made by others."""
    max_quarantined: Fraction = 0.01
    """Stop when more than this share of rows fails its checks."""
    soft_labels: int = Field(default=0, ge=0, le=1024)
    """Stored with every response token: the target's k likeliest tokens and their log-probs (8 k bytes a token, and the
    target's upper layers and head run too). For kl, tv, lk and train.soft_label_share; 0 or false: none, true: 32."""
    soft_label_temperature: float = Field(default=1.0, gt=0)
    """Divides the target's logits before; the temperature the drafter will be served at."""
    min_greedy_match: Fraction = 0.95
    """Greedy corpora: the target's own argmax must equal this share of response tokens on the first rows, else stop."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Measured prefill tokens/s of one GPU, for plans; null: the plan says what it assumes."""
    free_disk_bytes: PositiveInt | None = None
    """For plans made elsewhere; null: ask the file system."""

    @field_validator("soft_labels", mode="before")
    @classmethod
    def _check_soft_labels(cls, value: Any) -> Any:
        # a bool is an int to pydantic, and `true` would be one label
        return NUM_SOFT_LABELS * value if isinstance(value, bool) else value

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str | None) -> str | None:
        scheme, separator, path = (value or "").partition("://")
        if separator and (scheme not in ("s3", "gs") or not path.strip("/")):
            raise ValueError("use a path, s3://bucket/prefix or gs://bucket/prefix")
        return value


class EvaluationSection(Section):
    acceptors: tuple[AcceptorName, ...] = Field(
        default=("chain", "chain_rejection", "tree", "tree_spine", "tree_cost"), min_length=1
    )
    """chain_rejection (the p/q sampler of servers) is decoded live at temperatures above 0 only; tree_spine is the tree with the
    chain guaranteed inside; tree_cost grows while expected tokens a second rise, by costs measured on this machine."""
    budgets: tuple[TreeBudget, ...] = Field(default=(8, 16, 32, 64, 128), min_length=1)
    """Tree budgets B (nodes without the root). tree_cost takes at most the largest."""
    live_budgets: tuple[TreeBudget, ...] = (64,)
    """Budgets of tree and tree_spine decoded live; replay covers all."""
    live_batch_size: PositiveInt = 1
    """Prompts decoded together. 1: timings are those of one sequence; more: of the whole batch, shared evenly."""
    drafter_device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:\d+)?)$")
    """Device of the drafter and its copy of the head, e.g. `cuda:1` beside a target that `target.device_map` keeps on others.
    null: the rank's own."""
    cost_file: Path | None = None
    """costs.json of another evaluation, for tree_cost: the same sizes wherever it runs. null: measured once, then kept."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    """Target sampling temperatures of live decoding; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    drafter_temperature: Literal["fit"] | Annotated[float, Field(gt=0)] = 1.0
    """Divides the drafter's logits before the tree is built. fit: one a slot, fitted on validation rows."""
    fit_anchors: PositiveInt = 1024
    """Validation anchors that a fit looks at, at most: the error of a slot's temperature is about 1 / sqrt of it."""
    live_prompts: int = Field(default=40, ge=0)
    replay_prompts: int = Field(default=200, ge=0)
    max_new_tokens: PositiveInt = 512
    dtype: Dtype = "float32"
    """Dtype of live decoding. Only float32 makes greedy losslessness a theorem; bf16 flips near-ties."""

    @model_validator(mode="after")
    def _check(self) -> EvaluationSection:
        if set(self.acceptors) == {"chain_rejection"} and not any(self.temperatures):
            raise ValueError(
                f"evaluation.acceptors=[chain_rejection] decodes nothing at evaluation.temperatures={list(self.temperatures)}: "
                "it samples; add a temperature above 0 or another acceptor"
            )
        return self

    @property
    def unfitted_temperature(self) -> float:
        """Of the drafter where no fit has been made yet: while it is trained."""
        return 1.0 if self.drafter_temperature == "fit" else self.drafter_temperature


class ExportSection(Section):
    checkpoint: Literal["best", "last"] = "best"
    """best: by validation tree acceptance."""
    license: str = "apache-2.0"
    """Of the exported weights, written to the model card."""
    base_model: str | None = None
    """Hub id of the target, for the model card, the serve commands and speculators' verifier; null: target.model."""
    verify_rows: PositiveInt = 4
    """Feature rows whose logits are compared between the training code and the reloaded export."""


class Config(Section):
    """A whole run."""

    run: RunSection
    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    extract: ExtractSection = Field(default_factory=ExtractSection)
    train: TrainSection
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    export: ExportSection = Field(default_factory=ExportSection)

    @property
    def soft_label_sharpness(self) -> float:
        """Power to which stored probabilities are raised before training compares with them; 1: as stored."""
        wanted = self.train.soft_label_temperature
        return 1.0 if wanted is None else self.extract.soft_label_temperature / wanted

    @property
    def features_location(self) -> str:
        """Of the feature shards: a path or a bucket's URL, for common.storage.open_storage."""
        return self.extract.folder or str(self.run.folder / "features")

    @model_validator(mode="after")
    def _check(self) -> Config:
        taps, depth = self.drafter.target_layer_ids, self.target.num_layers
        if taps[-1] >= depth - 1:
            raise ValueError(
                f"drafter.target_layer_ids={list(taps)}: layer {taps[-1]} cannot be tapped; the target has layers "
                f"0..{depth - 1} and the last one is never tapped (HF returns it after the final norm); use at most {depth - 2}"
            )
        if self.drafter.mask_token_id >= self.target.vocab_size:
            raise ValueError(
                f"drafter.mask_token_id={self.drafter.mask_token_id} is outside the target's vocabulary of "
                f"{self.target.vocab_size} (target.vocab_size); choose an id below it"
            )
        if self.train.needs_soft_labels and not self.extract.soft_labels:
            raise ValueError(
                f"train.loss={self.train.loss} with train.soft_label_share={self.train.soft_label_share} needs the target's "
                "distribution; set extract.soft_labels (16) and extract again, or choose hard labels"
            )
        stored, wanted = self.extract.soft_label_temperature, self.train.soft_label_temperature
        if wanted is not None and wanted > stored:
            raise ValueError(
                f"train.soft_label_temperature={wanted:g} is above extract.soft_label_temperature={stored:g}: what the tail of a "
                "stored distribution would hold at a higher temperature is not known; lower it, or extract again at the higher one"
            )
        missing = set(self.evaluation.live_budgets) - set(self.evaluation.budgets)
        if missing:
            raise ValueError(
                f"evaluation.live_budgets {sorted(missing)} are not in evaluation.budgets"
            )
        return self
