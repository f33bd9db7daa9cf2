"""`./launch.sh watch RUN...`: the page of a run, or of several laid over each other; a picture of one for a README."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from common.command import StageParser, run_command
from train.watch.log import RunLog, read_runs
from train.watch.page import page_path, write_page
from train.watch.picture import write_picture


def main(options: argparse.Namespace) -> None:
    if options.every is not None and not 0 < options.every < math.inf:
        raise ValueError(f"--every {options.every:g}: give seconds above 0")
    runs = _show(options)
    while options.every is not None and not all(run.is_finished for run in runs):
        time.sleep(options.every)
        runs = _show(options, is_first=False)


def _show(options: argparse.Namespace, is_first: bool = True) -> list[RunLog]:
    runs = read_runs(options.runs)
    if options.picture is not None:
        write_picture(options.picture, runs)
    page = options.output or _default_page(options)
    write_page(page, runs)
    if is_first:
        steps = ", ".join(f"{run.name} at step {run.step}" for run in runs)
        print(
            f"{steps}\npage: {page}" + (f"\npicture: {options.picture}" if options.picture else "")
        )
    return runs


def _default_page(options: argparse.Namespace) -> Path:
    """Beside the log of a run alone, or of the last one named."""
    own = page_path(options.runs[-1])
    return own if len(options.runs) == 1 else own.with_name("compared.html")


def parser() -> argparse.ArgumentParser:
    found = StageParser(prog="./launch.sh watch", description=__doc__)
    found.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, e.g. outputs/demo"
    )
    found.add_argument("--output", type=Path, metavar="FILE", help="the page; default: in RUN/logs")
    found.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="write it again this often until the runs are at their end",
    )
    found.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="also a picture of the main charts"
    )
    found.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return found


run_command(parser(), main)
