"""`./launch.sh verify-features DIR`: every byte of a features folder against its manifest, some rows against the target; `--repair`."""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from common.command import StageParser, run_command
from common.storage import Storage, open_storage
from configs.load import load_config
from data.features import open_features
from extract.plan import format_bytes
from extract.repair import repair
from extract.verify import Verified, verify_files
from extract.verify_sample import choose, compare_rows, load_same_target

logger = logging.getLogger(__name__)


def verify_parser() -> StageParser:
    parser = StageParser(
        prog="./launch.sh verify-features",
        description="Read every byte of a features folder: sums, checksums of pages, ids, lengths and counts, and some rows against "
        "a fresh forward of the target that its manifest names.",
    )
    parser.add_argument("location", help="a features folder, or s3://bucket/prefix")
    parser.add_argument(
        "--sample", type=int, default=4, metavar="N", help="rows compared with the target (0: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses them")
    parser.add_argument("--threads", type=int, default=4, help="shards read at once")
    parser.add_argument(
        "--repair", action="store_true", help="make what is damaged again, with equal bytes"
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE",
        help="the recipe that made the features: for --repair, and for its target.device_map",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for RECIPE, as of a stage"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(options: argparse.Namespace) -> None:
    """Raises ValueError if anything is damaged and stays so."""
    _check_options(options)
    storage = open_storage(options.location)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(options.config, options.overrides) if options.config else None
    verified = verify_files(storage, options.threads)
    for damage in verified.damages:
        logger.warning("damaged: %s", damage)
    if verified.damages and options.repair:
        _set_threads(verified)
        mended = repair(storage, verified, config, device)
        logger.info("made again: %s", ", ".join(mended))
        verified = verify_files(storage, options.threads)
    _require_whole(storage, verified)
    _say(storage, verified)
    if options.sample:
        _set_threads(verified)
        device_map = config.target.device_map if config else None
        compare(storage, verified, options.sample, options.seed, device, device_map)


def verify(location: str, num_threads: int) -> None:
    """Every byte, without the target. Raises ValueError if anything is damaged."""
    storage = open_storage(location)
    verified = verify_files(storage, num_threads)
    for damage in verified.damages:
        logger.warning("damaged: %s", damage)
    _require_whole(storage, verified)
    _say(storage, verified)


def _check_options(options: argparse.Namespace) -> None:
    if options.overrides and not options.config:
        raise ValueError(f"{options.overrides[0]} changes a recipe: name it with --config RECIPE")
    if options.threads < 1 or options.sample < 0:
        raise ValueError(
            f"--threads {options.threads}, --sample {options.sample}: give at least 1 thread, and 0 or more rows"
        )


def compare(
    storage: Storage,
    verified: Verified,
    count: int,
    seed: int,
    device: torch.device,
    device_map: str | None = None,
) -> None:
    """device_map: for a target too big for one GPU. Raises ValueError if a row is not what the target computes."""
    features = open_features(storage)
    if not features.entries:
        return
    target = load_same_target(verified.manifest.settings, device, device_map)
    found = compare_rows(features, verified.manifest, target, choose(features.entries, count, seed))
    if wrong := [row for row in found if not row.is_good]:
        raise ValueError(f"{len(wrong)} of {len(found)} rows are not the target's: {wrong[0]}")
    same = sum(row.is_same for row in found)
    worst = max(max(row.errors) for row in found)
    sys.stdout.write(
        f"{len(found)} rows against a fresh forward: {same} bit for bit, largest difference {worst:.2g} of a feature's length "
        f"(up to {found[0].limit} is rounding)\n"
    )


def _set_threads(verified: Verified) -> None:
    """On a CPU the number of threads is part of the result."""
    torch.set_num_threads(verified.manifest.settings["cpu_threads"])


def _require_whole(storage: Storage, verified: Verified) -> None:
    if not verified.damages:
        return
    first, more = verified.damages[0], len(verified.damages) - 1
    others = f" (and {more} more, above)" if more else ""
    raise ValueError(f"{storage.url}: {first}{others}; --repair --config RECIPE makes it again")


def _say(storage: Storage, verified: Verified) -> None:
    manifest = verified.manifest
    sys.stdout.write(
        f"{storage.url}: {manifest.num_rows:,} rows in {len(manifest.shards):,} shards, {format_bytes(verified.num_bytes)}, all as the "
        f"manifest says; {len(manifest.quarantined):,} rows quarantined\n"
    )


if __name__ == "__main__":
    run_command(verify_parser(), main)
