"""Runs as processes of their own, a few at once: a stopped ablation continues with the runs that are not done."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.progress import Progress
from common.storage import open_storage
from data.feature_manifest import MANIFEST_FILE
from extract.launch import visible_gpus
from train.ablation.runs import AblationRun, base_config
from train.ablation.settings import Ablation

POLL_S = 0.2
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    run: AblationRun
    process: subprocess.Popen[bytes]
    slot: int
    log: IO[bytes]


def run_all(
    path: Path, runs: Sequence[AblationRun], num_jobs: int, arguments: Sequence[str]
) -> None:
    """Train and judge each run in a process of its own, at most `num_jobs` at once, one torch thread or one GPU each.

    Raises ValueError naming the log of the first that fails; the others are asked to save and stop.
    """
    if not runs:
        return
    waiting, running = list(runs), dict[int, Job]()
    progress = Progress("ablation", len(runs), "runs", every_s=30.0)
    with _stopped_at_the_end(running):
        while waiting or running:
            for slot in set(range(num_jobs)) - running.keys():
                if waiting:
                    running[slot] = _start(path, waiting.pop(0), slot, arguments)
            time.sleep(POLL_S)
            for job in [job for job in running.values() if job.process.poll() is not None]:
                del running[job.slot]
                job.log.close()
                if job.process.returncode != 0:
                    raise ValueError(f"{job.run.folder.name} failed: {_last_line(job)}")
                progress.advance(1, job.run.folder.name)
    progress.finish()


def make_features(ablation: Ablation) -> None:
    """Run data and extract for the base recipe if its features are not there. Raises ValueError if a stage fails."""
    if open_storage(base_config(ablation).features_location).exists(MANIFEST_FILE):
        return
    for stage in ("data", "extract"):
        command = [sys.executable, "-m", stage, str(ablation.recipe), *ablation.overrides]
        if subprocess.run(command, check=False).returncode != 0:
            raise ValueError(
                f"the {stage} stage of {ablation.recipe} failed; see its message above"
            )


def _start(path: Path, run: AblationRun, slot: int, arguments: Sequence[str]) -> Job:
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    log = (run.folder / "ablation.log").open("ab")
    command = [sys.executable, "-m", "train.ablation", str(path), "--run", run.name]
    command += ["--seed", str(run.seed), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return Job(run, process, slot, log)


@contextlib.contextmanager
def _stopped_at_the_end(running: dict[int, Job]) -> Iterator[None]:
    """Whatever ends the block, no process outlives it: training saves at SIGTERM."""
    try:
        yield
    finally:
        for job in running.values():
            job.process.terminate()
        for job in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(STOP_TIMEOUT_S)
            job.process.kill()
            job.log.close()


def _last_line(job: Job) -> str:
    path = job.run.folder / "ablation.log"
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "no message")
    return f"{last.strip()} (all of it in {path})"
