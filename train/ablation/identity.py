"""What a judgement is of: one fingerprint, which settings that are younger than the first judgements leave as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from common.fingerprint import fingerprint
from configs.schema import Section
from train.ablation.runs import AblationRun

_TRAIN = """
steps global_batch_samples micro_batch_samples pack_tokens pack_blocks num_anchors anchors walk_share walk_refresh_steps
max_tokens loss soft_label_share tree_budget tree_temperature_nats surrogate_budgets surrogate_temperatures_nats lk_eta
decay_gamma dpace_alpha ce_warmup_fraction crossfade_fraction learning_rate min_learning_rate_ratio weight_decay beta1
beta2 adam_eps max_grad_norm lr_warmup_fraction schedule lr_decay_fraction dtype zero_stage activation_checkpointing
vocabulary head_chunk_rows init_from checkpoint_every keep_checkpoints eval_every eval_samples log_every wandb_project
"""
_DRAFTER = """
num_layers block_size mask_token_id target_layer_ids layer_types sliding_window num_attention_heads num_key_value_heads
head_dim intermediate_size rope_theta rms_norm_eps max_position_embeddings
"""
FIRST_TRAIN_SETTINGS, FIRST_DRAFTER_SETTINGS = (
    frozenset(_TRAIN.split()),
    frozenset(_DRAFTER.split()),
)
"""Settings there were when the first judgements were made."""


def judgement_identity(run: AblationRun, drafter: str, rows: Mapping[str, Sequence[str]]) -> str:
    """drafter: its fingerprint; rows: sample ids of the `fit` rows and of the judged ones, by name of the set."""
    config = run.config()
    return fingerprint(
        [
            drafter,
            settings_of(config.train, FIRST_TRAIN_SETTINGS),
            settings_of(config.drafter, FIRST_DRAFTER_SETTINGS),
            dict(rows),
            sorted(run.ablation.budgets),
            run.ablation.fit_anchors_per_row,
            config.evaluation.max_new_tokens,
            config.evaluation.dtype,
            torch.__version__,
        ]
    )


def settings_of(section: Section, first: frozenset[str]) -> dict[str, Any]:
    """All settings named in `first`, and of the younger ones those that are not at their default."""
    younger = section.model_dump(mode="json", exclude_defaults=True)
    values = section.model_dump(mode="json")
    return {key: value for key, value in values.items() if key in first or key in younger}
