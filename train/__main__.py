"""`python -m train CONFIG [section.key=value ...]`, also under torchrun and the deepspeed launcher."""

from __future__ import annotations

import argparse
import os

from common.command import run_command, stage_parser
from configs.load import load_config


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    # after the recipe is known to be good: these imports take seconds
    import torch

    from common.distributed import distributed

    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # said before DeepSpeed looks, it doesn't warn
    from train.loop import train_drafter

    with distributed(config.run.cpu_threads) as ranks:
        train_drafter(config, ranks)


run_command(stage_parser("train", "Train a drafter on the feature shards of a run."), main)
