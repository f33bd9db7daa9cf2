"""`./launch.sh extract CONFIG`: corpus -> features/, resumable, on any number of ranks."""

from __future__ import annotations

import argparse

from common.command import run_command, stage_parser
from common.distributed import distributed, rank_from_environment
from configs.load import load_config
from data.features import verify_features
from extract.run import run_extract

# a rank may wait for another's last shards, or for its check of finished ones, far longer than a collective takes
TIMEOUT_S = 24 * 3600.0


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    if options.verify:
        if rank_from_environment() == 0:
            count = verify_features(config.run.folder / "features")
            print(f"{count} files are what the manifest says")
        return
    with distributed(config.run.cpu_threads, TIMEOUT_S) as ranks:
        run_extract(config, ranks, options.ignore_disk)


if __name__ == "__main__":
    parser = stage_parser(
        "extract", "Run the frozen target over the corpus and store its features."
    )
    parser.add_argument(
        "--verify", action="store_true", help="only compare every file with its sha256"
    )
    parser.add_argument(
        "--ignore-disk", action="store_true", help="start even if the features exceed the free disk"
    )
    run_command(parser, main)
