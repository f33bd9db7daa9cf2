"""`./launch.sh evaluate CONFIG`: replay, live decoding, report; or the losslessness check alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common.command import run_command, stage_parser
from common.distributed import Ranks, distributed, raise_together
from configs.load import load_config
from configs.schema import Config
from evaluation.inputs import DrafterSource, find_drafter, random_drafter
from evaluation.lossless import run_lossless
from evaluation.stage import Work, plan_work, run_evaluation, write_report
from evaluation.summary import lossless_lines, summary_lines

TIMEOUT_S = 24 * 3600.0  # a rank may finish its prompts hours before another


def main(options: argparse.Namespace) -> None:
    _refuse_conflicts(options)
    config = load_config(options.config, options.overrides)
    with distributed(config.run.cpu_threads, TIMEOUT_S) as ranks:
        if options.report_only:
            with raise_together(ranks):
                rewrite_report(config, ranks, options.drafter, options.random_drafter)
            equal = True
        elif options.lossless is not None:
            equal = check_losslessness(config, ranks, options.drafter, options.lossless)
        else:
            evaluate(config, ranks, options.drafter, options.random_drafter)
            equal = True
    sys.exit(0 if equal else 1)


def evaluate(config: Config, ranks: Ranks, folder: Path | None, is_random: bool) -> None:
    with raise_together(ranks):
        work = plan_work(config, ranks, _source(config, folder, is_random))
    report = run_evaluation(work)
    if report is not None:
        _show_report(work, report)


def rewrite_report(config: Config, ranks: Ranks, folder: Path | None, is_random: bool) -> None:
    """From the records of an evaluation that has finished."""
    work = plan_work(config, ranks, _source(config, folder, is_random))
    if ranks.is_main:
        _show_report(work, write_report(work))


def check_losslessness(config: Config, ranks: Ranks, folder: Path | None, num_prompts: int) -> bool:
    """Whether every prompt was equal; on other ranks than the main one, whether nothing failed."""
    if num_prompts < 1:
        raise ValueError(f"--lossless {num_prompts}: give the number of prompts, at least 1")
    with raise_together(ranks):
        trained = find_drafter(config, folder)
        # what it measures on the way is float32's too, and kept apart from that of another dtype
        evaluation = config.evaluation.model_copy(update={"dtype": "float32"})
        work = plan_work(config.model_copy(update={"evaluation": evaluation}), ranks, trained)
    untrained = DrafterSource(None, trained.config, config.run.seed)
    result: dict[str, Any] | None = run_lossless(work, [trained, untrained], num_prompts)
    if result is None:
        return True
    _show(lossless_lines(result))
    return result["num_equal"] == result["num_prompts"]


def _refuse_conflicts(options: argparse.Namespace) -> None:
    """Raises ValueError for two options of which one would be passed over without a word."""
    given = {
        "--drafter": options.drafter is not None,
        "--random-drafter": options.random_drafter,
        "--report-only": options.report_only,
        "--lossless": options.lossless is not None,
    }
    for first, second in (
        ("--drafter", "--random-drafter"),
        ("--lossless", "--random-drafter"),
        ("--lossless", "--report-only"),
    ):
        if given[first] and given[second]:
            raise ValueError(
                f"{first} and {second} exclude each other; give one (--lossless decodes with a random drafter too)"
            )


def _source(config: Config, folder: Path | None, is_random: bool) -> DrafterSource:
    return random_drafter(config) if is_random else find_drafter(config, folder)


def _show_report(work: Work, report: dict[str, Any]) -> None:
    _show(summary_lines(report))
    print(f"\nreport: {work.folder / 'report.html'}")


def _show(lines: list[str]) -> None:
    print("\n".join(lines))


if __name__ == "__main__":
    parser = stage_parser("evaluate", "acceptance length, speed and losslessness of a drafter")
    parser.add_argument(
        "--drafter",
        type=Path,
        metavar="FOLDER",
        help="a drafter folder; default: the best checkpoint",
    )
    parser.add_argument(
        "--random-drafter", action="store_true", help="a randomly initialised drafter"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="write the report again from finished records"
    )
    parser.add_argument(
        "--lossless",
        type=int,
        metavar="N",
        help="only check that greedy output equals plain decoding on N prompts, with the trained and a random drafter",
    )
    run_command(parser, main)
