"""Fixtures that every room's tests share: tiny runs and the tiny targets they are made from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test touches a hub

import pytest
import torch
import yaml

from configs.load import load_config
from configs.schema import Config
from target.load import Target, load_target
from target.prepare import prepare_target

FAMILIES = ("llama", "qwen3", "qwen3_sliding")
"""Every kind of tiny target; `@pytest.mark.parametrize("family", FAMILIES)` with `from conftest import FAMILIES`."""
HYBRID = "qwen3_5"
"""A random hybrid, three Gated-DeltaNet layers to one of full attention: `tiny_target(HYBRID)`."""

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """`tiny_config(family="llama", overrides=())` -> Config of a tiny run in a new empty folder; its target exists.

    float32, 6 layers of 64, vocabulary 320, taps 1, 2, 4; a drafter of 2 layers and blocks of 4; 24 prompts in a jsonl.
    """
    targets = tmp_path_factory.mktemp("targets")
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(_conversation(i)) + "\n" for i in range(24)))

    def make(family: str = "llama", overrides: Sequence[str] = ()) -> Config:
        folder = tmp_path_factory.mktemp("run")
        recipe = folder / "tiny.yaml"
        recipe.write_text(yaml.safe_dump(_recipe(family, targets / family, prompts, folder)))
        config = load_config(recipe, overrides)
        prepare_target(config)
        return config

    return make


@pytest.fixture(scope="session")
def tiny_target(tiny_config: Callable[..., Config]) -> Callable[..., Target]:
    """`tiny_target(family="llama")` -> the tiny target of that family, float32, on the CPU, loaded once a session."""
    loaded: dict[str, Target] = {}

    def load(family: str = "llama") -> Target:
        if family not in loaded:
            loaded[family] = load_target(tiny_config(family).target, "cpu")
        return loaded[family]

    return load


def _conversation(i: int) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": f"Count from {i} to {3 * i + 1}, please."}]}


def _recipe(family: str, target: Path, prompts: Path, run: Path) -> dict[str, dict[str, object]]:
    return {
        "run": {"name": "tiny", "output_dir": str(run / "run")},
        "target": {
            "model": str(target),
            "prepare": {"kind": "tiny", "family": family},
            "hidden_size": 64,
            "num_layers": 6,
            "vocab_size": 320,
            "dtype": "float32",
        },
        "drafter": {
            "num_layers": 2,
            "block_size": 4,
            "mask_token_id": 259,
            "target_layer_ids": [1, 2, 4],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "rope_theta": 10000.0,
        },
        "data": {
            "sources": [{"name": "tiny", "kind": "jsonl", "path": str(prompts)}],
            "responses": {"max_new_tokens": 24, "batch_size": 8, "unit_size": 8},
            "max_prompt_tokens": 128,
            "max_tokens": 192,
            "max_repetition": 1.0,
            "validation_fraction": 0.2,
            "test_fraction": 0.2,
            "rows_per_shard": 8,
        },
        "extract": {"codec": "fp32", "shard_bytes": 1_000_000, "batch_tokens": 1024},
        "train": {
            "steps": 6,
            "global_batch_samples": 2,
            "micro_batch_samples": 1,
            "num_anchors": 8,
            "max_tokens": 192,
            "tree_budget": 8,
            "dtype": "float32",
            "checkpoint_every": 3,
            "eval_every": 3,
            "eval_samples": 2,
            "log_every": 1,
            "wandb_project": None,
        },
        "evaluation": {
            "budgets": [4, 8],
            "live_budgets": [8],
            "live_prompts": 2,
            "replay_prompts": 4,
            "max_new_tokens": 24,
        },
    }
