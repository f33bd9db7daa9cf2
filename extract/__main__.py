"""`./launch.sh extract CONFIG`: corpus -> features/, resumable, by any number of workers that come and go."""

from __future__ import annotations

import argparse
import os

import torch

from common.command import run_command, stage_parser
from common.distributed import Ranks, end_with_parent, rank_from_environment
from configs.load import load_config
from configs.schema import Config
from extract.run import run_extract
from extract.verify_command import verify


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    if options.verify:
        if rank_from_environment() == 0 or _world_size() == 1:
            verify(config.features_location, num_threads=4)
        return
    run_extract(config, this_worker(config), options.ignore_disk)


def this_worker(config: Config) -> Ranks:
    """Rank and device, from the variables of extract.launch or torchrun if there are any. No process group: workers share
    the features folder and nothing else."""
    world, local = _world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    if world > 1:
        end_with_parent(os.getppid())
    if not torch.cuda.is_available():
        torch.set_num_threads(config.run.cpu_threads)
        return Ranks(rank_from_environment(), world, local, torch.device("cpu"))
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} has no GPU: {torch.cuda.device_count()} visible; set NPROC to at most that"
        )
    torch.cuda.set_device(local)
    return Ranks(rank_from_environment(), world, local, torch.device("cuda", local))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def extract_parser() -> argparse.ArgumentParser:
    parser = stage_parser(
        "extract", "Run the frozen target over the corpus and store its features."
    )
    parser.add_argument(
        "--verify", action="store_true", help="only check what is there (verify-features says more)"
    )
    parser.add_argument(
        "--ignore-disk", action="store_true", help="start even if the features exceed the free disk"
    )
    return parser


if __name__ == "__main__":
    run_command(extract_parser(), main)
