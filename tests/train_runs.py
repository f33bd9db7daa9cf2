"""Tiny training runs for the tests: feature shards made on the spot, curves read back, a kill at will.

Also a script for launchers: several runs in one process group, because starting one costs seconds.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from common.distributed import Ranks, distributed
from common.files import sha256_file, write_json
from configs.load import load_config
from configs.schema import Config
from data.feature_manifest import FeatureManifest, HeadEntry, ShardEntry
from data.feature_shards import FeatureLayout, FeatureRow, write_shard
from data.soft_labels import SoftLabels
from train.loop import Run, train_drafter
from train.tracking import TIMES

VOCABULARY, HIDDEN, TAPS = 48, 32, (1, 2)
ONE_RANK = Ranks(0, 1, 0, torch.device("cpu"))


def make_recipe(folder: Path) -> Path:
    """A recipe in `folder` whose run has features of 14 training and 3 validation rows, and no target."""
    recipe = {
        "run": {"name": "tiny", "output_dir": str(folder / "run")},
        "target": {
            "model": "no-target",
            "hidden_size": HIDDEN,
            "num_layers": 4,
            "vocab_size": VOCABULARY,
        },
        "drafter": {
            "num_layers": 2,
            "block_size": 5,
            "mask_token_id": VOCABULARY - 1,
            "target_layer_ids": list(TAPS),
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rope_theta": 10000.0,
        },
        "data": {"sources": [{"name": "tiny", "kind": "jsonl", "path": "unused"}]},
        "train": {
            "steps": 8,
            "global_batch_samples": 4,
            "micro_batch_samples": 1,
            "num_anchors": 6,
            "max_tokens": 40,
            "loss": "tree",
            "tree_budget": 8,
            "ce_warmup_fraction": 0.25,
            "crossfade_fraction": 0.25,
            "learning_rate": 1.0e-2,
            "dtype": "float32",
            "checkpoint_every": 4,
            "eval_every": 4,
            "eval_samples": 3,
            "log_every": 1,
            "wandb_project": None,
        },
        "evaluation": {"budgets": [4, 8], "live_budgets": [8]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    write_features(folder / "run" / "features")
    return path


def make_config(folder: Path, *overrides: str) -> Config:
    config = load_config(make_recipe(folder), overrides)
    if config.extract.soft_labels:
        write_features(config.run.folder / "features", num_soft_labels=config.extract.soft_labels)
    return config


def write_features(
    folder: Path, codec: str = "fp32", seed: int = 0, num_soft_labels: int = 0
) -> None:
    """Documents that count upwards, so that there is something to learn; two responses in some of them.

    Soft labels: 0.9 of the probability on the token itself, the rest on those before it.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.4
    mixing = torch.randn(len(TAPS), HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    rows = []
    for index in range(17):
        length = int(torch.randint(14, 50, (), generator=generator))
        start = int(torch.randint(0, VOCABULARY, (), generator=generator))
        input_ids = (start + torch.arange(length)) % (VOCABULARY - 1)
        loss_mask = torch.arange(length) >= 5
        if index % 3 == 0:
            loss_mask[length // 2] = False
        rows.append(
            FeatureRow(
                sample_id=f"sample-{index:02d}",
                source="tiny",
                task="tiny",
                split="validation" if index >= 14 else "train",
                input_ids=input_ids,
                loss_mask=loss_mask,
                features=torch.einsum("sh,dhi->sdi", embedding[input_ids], mixing),
                soft_labels=soft_labels(input_ids, num_soft_labels) if num_soft_labels else None,
            )
        )
    write_rows(folder, rows, embedding, codec, num_soft_labels)


def soft_labels(input_ids: torch.Tensor, kept: int) -> SoftLabels:
    token_ids = (input_ids[:, None] - torch.arange(kept)) % VOCABULARY
    probs = torch.full((kept,), 0.09 / (kept - 1))
    probs[0] = 0.9
    return SoftLabels(token_ids, probs.log().expand(len(input_ids), -1))


def write_rows(
    folder: Path,
    rows: Sequence[FeatureRow],
    embedding: torch.Tensor,
    codec: str = "fp32",
    num_soft_labels: int = 0,
) -> None:
    """A features folder with one shard, tied embedding and head."""
    folder.mkdir(parents=True, exist_ok=True)
    shard, head = folder / "shard-000000.parquet", folder / "target_head.safetensors"
    layout = FeatureLayout(codec, len(TAPS), HIDDEN, num_soft_labels)  # pyright: ignore[reportArgumentType]
    write_shard(shard, rows, layout)
    save_file({"embed_tokens.weight": embedding}, head)
    entries = [
        {
            "sample_id": row.sample_id,
            "source": row.source,
            "task": row.task,
            "split": row.split,
            "num_tokens": len(row.input_ids),
            "num_response_tokens": int(row.loss_mask.sum()),
        }
        for row in rows
    ]
    manifest = FeatureManifest(
        settings={
            "recipe": {},
            "model": "no-target",
            "revision": None,
            "chat_template_kwargs": {},
            "target_layer_ids": list(TAPS),
            "hidden_size": HIDDEN,
            "codec": codec,
            **(
                {"soft_labels": num_soft_labels, "soft_label_temperature": 1.0}
                if num_soft_labels
                else {}
            ),
        },
        shards=[
            ShardEntry(
                shard.name,
                len(rows),
                sum(len(row.input_ids) for row in rows),
                shard.stat().st_size,
                sha256_file(shard),
                entries,
            )
        ],
        quarantined=[],
        head=HeadEntry(head.name, sha256_file(head)),
    )
    write_json(folder / "manifest.json", manifest.to_json())


def read_curve(run: Path) -> list[dict[str, Any]]:
    """The lines of logs/train.jsonl without the values that are times."""
    lines = (run / "logs" / "train.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in read_curve(run) if "train/loss" in line]


def losses_and_norms(run: Path) -> list[float]:
    """Loss and gradient norm of every logged step, in turn."""
    lines = [line for line in read_curve(run) if "train/loss" in line]
    return [line[name] for line in lines for name in ("train/loss", "train/grad_norm")]


class Interrupted(Exception):
    """Stands for a kill: nothing of ours catches it."""


@contextlib.contextmanager
def killed_after_saving(step: int) -> Iterator[None]:
    """Training inside ends abruptly once the checkpoint of `step` is on disk."""
    save = Run.save

    def save_then_die(self: Run, accepted: float | None) -> None:
        save(self, accepted)
        if self.state.step == step:
            raise Interrupted

    Run.save = save_then_die
    try:
        yield
    except Interrupted:
        pass
    finally:
        Run.save = save


def main() -> None:
    """Under a launcher: jobs from a JSON file, [recipe, overrides, step to be killed after or null], one after another."""
    jobs = json.loads(Path(sys.argv[-1]).read_text())
    with distributed(1) as ranks:
        for recipe, overrides, kill_step in jobs:
            killed = (
                contextlib.nullcontext() if kill_step is None else killed_after_saving(kill_step)
            )
            with killed:
                train_drafter(load_config(recipe, overrides), ranks)


if __name__ == "__main__":
    main()
