"""`python -m train.ablation FILE`: train every variant of every seed, replay held-out prompts, write the table."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common.command import StageParser, run_command
from train.ablation.settings import Ablation, read_ablation


def main(options: argparse.Namespace) -> None:
    ablation = read_ablation(Path(options.file))
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: give the number of runs at once, at least 1")
    if options.run is not None:
        _one_run(ablation, options)
        return
    if options.only:
        ablation = ablation.only(options.only.split(","))
    # after the file is known to be good: these imports take seconds
    from train.ablation.judge import divide_prompts, is_judged, is_trained
    from train.ablation.live import is_decoded
    from train.ablation.results import write_results
    from train.ablation.runs import base_config, variants, warmups
    from train.ablation.schedule import make_features, run_all
    from train.inputs import read_inputs

    make_features(ablation)
    sets = divide_prompts(read_inputs(base_config(ablation)).features, ablation)
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in vars(sets).items())
    print(f"held-out prompts: {counts}; {len(variants(ablation))} runs of {ablation.steps} steps")
    path, prompts = Path(options.file), "confirm" if options.confirm else "judge"
    runs = variants(ablation)
    if options.confirm:
        if not ablation.confirm or not sets.confirm:
            raise ValueError(f"{path}: --confirm needs `confirm` variants and prompts")
        runs = [run for run in runs if run.name in {ablation.baseline, *ablation.confirm}]
    untrained = [run for run in warmups(ablation) if not is_trained(run)]
    run_all(path, untrained, options.jobs, [])
    waiting = [
        run
        for run in runs
        if not (is_judged(run, prompts, sets) and (options.confirm or is_decoded(run, sets)))
    ]
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are trained and judged already")
    run_all(path, waiting, options.jobs, ["--confirm"] if options.confirm else [])
    name, folder = "confirm" if options.confirm else "ablation", ablation.output_dir
    print(write_results(ablation, prompts, name))
    curves = "" if options.confirm else f"; training curves to {folder / 'curves'}.json, .svg"
    print(f"written to {folder / name}.md, .json, .svg{curves}")


def _one_run(ablation: Ablation, options: argparse.Namespace) -> None:
    """A process of `run_all`."""
    import torch

    from common.distributed import distributed, end_with_parent

    end_with_parent(os.getppid())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from train.ablation.judge import judge_run
    from train.ablation.live import decode_run
    from train.ablation.runs import WARMUP, AblationRun
    from train.loop import train_drafter

    run = AblationRun(ablation, options.run, options.seed)
    run.share_features()
    config = run.config()
    with distributed(config.run.cpu_threads) as ranks:
        train_drafter(config, ranks)
        if run.name != WARMUP:
            judge_run(run, "confirm" if options.confirm else "judge", ranks)
            if not options.confirm:
                decode_run(run, ranks)


def parser() -> argparse.ArgumentParser:
    found = StageParser(prog="./launch.sh ablation", description=__doc__)
    found.add_argument("file", help="an ablation, e.g. configs/ablation/debug.yaml")
    found.add_argument("--jobs", type=int, default=1, help="runs at once (default 1)")
    found.add_argument(
        "--only",
        metavar="NAMES",
        help="these variants, e.g. tree,dpace, and the baseline: the others need not be trained yet",
    )
    found.add_argument(
        "--confirm",
        action="store_true",
        help="judge the file's `confirm` variants on the prompts that nothing has read yet: once, at the end",
    )
    found.add_argument("--run", help=argparse.SUPPRESS)
    found.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    found.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return found


run_command(parser(), main)
