"""The section `train`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.section import Dtype, Fraction, Section, TreeBudget

LossName = Literal[
    "ce", "dpace", "auf", "chain", "kl", "tv", "lk", "tree", "tree_live", "tree_surrogate"
]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
TREE_LOSSES = frozenset({"tree", "tree_live", "tree_surrogate"})
"""Losses that build the block's draft tree."""
WALK_LOSSES = TREE_LOSSES | {"dpace", "auf", "chain"}
"""Losses that expect a number of accepted tokens of each block."""
SOFT_LOSSES = frozenset({"kl", "tv", "lk"})
"""Losses that compare with the target's distribution."""


class TrainSection(Section):
    steps: PositiveInt
    """Optimizer steps."""
    global_batch_samples: PositiveInt = 32
    """Documents an optimizer step, over all ranks and micro-batches. Ranks never change it."""
    micro_batch_samples: PositiveInt = 1
    """Documents a forward on one rank."""
    pack_tokens: PositiveInt | None = None
    """Context tokens of a forward: documents are packed up to it, in constant shapes, and micro_batch_samples is not used.
    null: micro_batch_samples documents, padded to the longest."""
    pack_blocks: PositiveInt | None = None
    """Blocks of a packed forward; with pack_tokens only."""
    num_anchors: PositiveInt = 512
    """Blocks a document and step; fewer if the response is shorter."""
    anchors: Literal["uniform", "walk"] = "uniform"
    """uniform over response tokens; walk: a share of them where verify passes of the drafter as it is really start."""
    walk_share: Fraction = 1.0
    """walk: this share of a document's blocks is drawn from such starts, as far as there are any; the rest uniformly from all that
    remains."""
    walk_refresh_steps: PositiveInt = 200
    """walk: the coming documents are decoded again, from their records, every so many steps: a block a verify pass."""
    max_tokens: PositiveInt = 4096
    """Longer documents are cut here in training."""
    loss: LossName | dict[LossName, float] = "tree"
    """A name, or weights by name, e.g. {tree: 0.8, ce: 0.2}: slot weights are added up as they are (docs/losses.md)."""
    soft_label_share: Fraction = 0.0
    """Labels: 0 the recorded token (serving greedily), 1 the target's distribution (T=1), between: both. Above 0 it needs
    extract.soft_labels. kl, tv and lk always compare with the distribution."""
    soft_label_temperature: float | None = Field(default=None, gt=0)
    """Sharpens the stored distribution to this temperature, at most the one it was extracted at; null: as stored. So one
    extraction serves every temperature below it."""
    tree_budget: TreeBudget = 64
    """B inside tree and tree_live; checkpoints are compared at it."""
    tree_temperature_nats: float = Field(default=3.0, gt=0)
    """Softness of survival in tree, in nats."""
    walk_power: float | None = Field(default=None, ge=0, le=2)
    """p: dpace, auf, chain and the tree losses weigh a block by 1 / (1 + A)^p, A the draft tokens they expect of it: uniform
    anchors lie in long drafts A + 1 times as often as passes start there. null: 1 for the tree losses, 0 (as published) for
    the others."""
    surrogate_budgets: tuple[TreeBudget, ...] | None = Field(default=None, min_length=1)
    """tree_surrogate: budgets it averages over; null: tree_budget alone."""
    surrogate_temperatures_nats: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.5)
    """tree_surrogate: its softness after the warm-up and at the last step, in nats; geometric between."""
    lk_eta: NonNegativeFloat = 3.0
    """lk: how fast it turns from kl to tv as the overlap with the target grows."""
    decay_gamma: float | None = Field(default=None, gt=0)
    """Position decay exp(-(k-1)/gamma) of ce; null: 4, 5, 7 for blocks of 8, 10, 16 (linear between)."""
    dpace_alpha: Fraction = 0.5
    """Smoothing of D-PACE's confidences."""
    ce_warmup_fraction: Fraction = 0.2
    """All losses but ce start with decayed CE for this share of the steps, then cross-fade."""
    crossfade_fraction: Fraction = 0.15
    learning_rate: float = Field(default=6e-4, gt=0)
    min_learning_rate_ratio: Fraction = 0.0
    """Last learning rate over the peak."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    lr_warmup_fraction: Fraction = 0.04
    schedule: Literal["wsd", "cosine"] = "wsd"
    """wsd: warm-up, stable, linear decay; its stable part can be continued."""
    lr_decay_fraction: Fraction = 0.2
    """wsd only: share of the steps spent decaying."""
    source: Literal["shards", "stream", "online"] = "shards"
    """Where features come from (docs/streaming.md). shards: extract writes all of them first. stream: extract keeps a ring of
    stream_bytes filled while training runs. online: the trainer's ranks run the target themselves, without disk. The batches are
    the same."""
    shuffle_window: PositiveInt | None = None
    """W: an epoch takes shard-sized blocks of the corpus in a seeded order and shuffles the rows of W blocks at a time. stream and
    online need it; null: all rows are shuffled, which only shards can follow."""
    stream_bytes: PositiveInt | None = None
    """stream: the most that the ring may hold; two windows or more: less is refused with the number that would do."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of the drafter; fp32 master weights and moments in either case."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon, its updates scaled to AdamW's size so that learning_rate and weight_decay mean the same
    (arXiv:2502.16982), norms by AdamW. Muon needs whole matrices: zero_stage 0, or 1 in bfloat16."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: Nesterov momentum."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as train.init_from has them: a name, the module it is in (`fc`, `layers.0`), or a pattern with *.
    They are in neither optimizer nor checkpoint."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["optimizer", "all"] | None = None
    """optimizer: float32 masters and moments lie in host memory and the CPU updates them (zero_stage 1 to 3); all: the
    parameters lie there too (zero_stage 3). Saves GPU memory, costs time."""
    activation_checkpointing: bool = False
    vocabulary: Literal["target", "corpus"] = "target"
    """Tokens in training's softmax. corpus: those of the training rows only, a fraction of the cost on a CPU; evaluation
    always uses all."""
    head_chunk_rows: PositiveInt = 1024
    """Rows of logits alive at once: memory is this times the vocabulary."""
    init_from: str | None = None
    """A drafter folder (z-lab's or speculators' format, a checkpoint or an export of ours) or `target_layers`; null: random."""
    checkpoint_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    """Newest ones kept; the best by tree acceptance is kept besides."""
    eval_every: PositiveInt = 500
    eval_samples: PositiveInt = 64
    """Validation documents replayed at each evaluation."""
    log_every: PositiveInt = 10
    peak_tflops: float | None = Field(default=None, gt=0)
    """Dense peak of one device in train.dtype, for speed/mfu; null: by the GPU's name, and no MFU where it is not known."""
    wandb_project: str | None = "dflash-drafters"
    """W&B project; offline without WANDB_API_KEY; null: local JSONL only."""

    @property
    def losses(self) -> dict[LossName, float]:
        """Weights by name."""
        return self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}

    @property
    def walk_powers(self) -> dict[LossName, float]:
        """By loss, of those of the recipe that follow a walk: walk_power, or what null means for it."""
        names: list[LossName] = [name for name in self.losses if name in WALK_LOSSES]
        if self.walk_power is not None:
            return dict.fromkeys(names, self.walk_power)
        return {name: 1.0 if name in TREE_LOSSES else 0.0 for name in names}

    @property
    def needs_soft_labels(self) -> bool:
        return self.soft_label_share > 0 or not SOFT_LOSSES.isdisjoint(self.losses)

    @field_validator("loss", mode="before")
    @classmethod
    def _check_loss(cls, value: Any) -> Any:
        # said here: a union's own errors name its members, not the key
        weights = value if isinstance(value, dict) else {str(value): 1.0}
        known = ", ".join(f"'{name}'" for name in LOSS_NAMES)
        if not weights or not set(weights) <= set(LOSS_NAMES):
            raise ValueError(f"a loss is one of {known}, or a mapping of such names to weights")
        numbers = [w for w in weights.values() if isinstance(w, int | float) and w > 0]
        if len(numbers) < len(weights):
            raise ValueError("weights of losses must be numbers above 0")
        return value

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.global_batch_samples % self.micro_batch_samples:
            raise ValueError(
                f"train.global_batch_samples={self.global_batch_samples} is not a multiple of "
                f"train.micro_batch_samples={self.micro_batch_samples}"
            )
        if (self.pack_tokens is None) != (self.pack_blocks is None):
            raise ValueError(
                f"train.pack_tokens={self.pack_tokens} and train.pack_blocks={self.pack_blocks}: give both or neither"
            )
        if self.pack_tokens is not None and self.pack_tokens < self.max_tokens:
            raise ValueError(
                f"train.pack_tokens={self.pack_tokens} does not hold a document of train.max_tokens={self.max_tokens}"
            )
        if self.pack_blocks is not None and self.pack_blocks < self.num_anchors:
            raise ValueError(
                f"train.pack_blocks={self.pack_blocks} does not hold train.num_anchors={self.num_anchors} blocks"
            )
        self._check_source()
        if self.lr_warmup_fraction + (self.lr_decay_fraction if self.schedule == "wsd" else 0) > 1:
            raise ValueError("train.lr_warmup_fraction + train.lr_decay_fraction exceed 1")
        self._check_sharding()
        return self

    def _check_sharding(self) -> None:
        """What DeepSpeed can cut, and what it cannot."""
        whole = self.zero_stage == 0 or (self.zero_stage == 1 and self.dtype == "bfloat16")
        if self.optimizer == "muon" and not (whole and self.offload is None):
            raise ValueError(
                f"train.optimizer=muon needs whole matrices, which train.zero_stage={self.zero_stage} in {self.dtype} with "
                f"train.offload={self.offload} does not keep; use zero_stage 0, or 1 in bfloat16, without offload"
            )
        needed = {None: 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"train.offload={self.offload} with train.zero_stage={self.zero_stage}: raise zero_stage to {needed}"
            )
        if self.freeze and self.init_from is None:
            raise ValueError(
                f"train.freeze={list(self.freeze)} without train.init_from: random weights would stay random; give init_from"
            )

    def _check_source(self) -> None:
        if self.source != "shards" and self.shuffle_window is None:
            raise ValueError(
                f"train.source={self.source} needs train.shuffle_window: how many shard-sized blocks are shuffled together, say 4"
            )
        if self.source == "stream" and self.stream_bytes is None:
            raise ValueError(
                "train.source=stream needs train.stream_bytes: what the ring of shards may take, two windows at least"
            )
        if self.anchors == "walk" and (self.source != "shards" or self.shuffle_window is not None):
            raise ValueError(
                f"train.anchors=walk replays documents ahead of their steps: it needs train.source=shards and no "
                f"train.shuffle_window (now {self.source}, {self.shuffle_window})"
            )
        if self.vocabulary == "corpus" and self.shuffle_window and self.needs_soft_labels:
            raise ValueError(
                "train.vocabulary=corpus with soft labels needs the target's likeliest tokens of all rows before training, which "
                "no stream has: set train.vocabulary=target, or train.source=shards without train.shuffle_window"
            )
