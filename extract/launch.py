"""Several workers on one machine: `NPROC=NUM python -m extract.launch CONFIG...` starts them and waits for the last.

Not torchrun: it ends all ranks when one fails, and these need nothing of each other. A worker that fails, with its GPU say,
leaves its shards to the others; the exit code is 0 if they completed the set.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from common.command import run_command
from configs.load import load_config
from extract.__main__ import extract_parser

logger = logging.getLogger(__name__)

STOPPED = (0, *(code for by in (signal.SIGTERM, signal.SIGINT) for code in (128 + by, -by)))
"""Complete, or told to stop; a worker that is still starting dies of the signal itself."""


def main(options: argparse.Namespace) -> None:
    """Exits with the workers' code. Every worker sees its own share of the GPUs: several each if there are more GPUs than workers,
    for a target that is spread by `target.device_map`. Raises ValueError for what no worker could start with."""
    load_config(options.config, options.overrides)  # its mistakes are said once
    num_workers = 1 if options.verify else max(1, number_from_environment("NPROC"))
    gpus = visible_gpus()
    if gpus and num_workers > len(gpus):
        raise ValueError(f"NPROC={num_workers}, but {len(gpus)} GPUs are visible; lower it")
    first = number_from_environment("NODE_RANK") * num_workers
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "extract", *sys.argv[1:]],
            env=os.environ | worker_environment(index, num_workers, first, gpus),
        )
        for index in range(num_workers)
    ]

    def forward(number: int, _: object) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal has told the workers too
    with ThreadPoolExecutor(num_workers) as pool:  # a death is said when it happens
        codes = list(pool.map(lambda index: _wait(index, workers), range(num_workers)))
    sys.exit(exit_code(codes))


def number_from_environment(name: str) -> int:
    """0 if the variable is not set. Raises ValueError if it is no number."""
    value = os.environ.get(name) or "0"
    if not value.isdecimal():
        raise ValueError(f"{name}={value}: give a number, 0 or more")
    return int(value)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and named.strip():
        return [name.strip() for name in named.split(",")][: torch.cuda.device_count()]
    return [str(index) for index in range(torch.cuda.device_count())]


def worker_environment(index: int, num_workers: int, first: int, gpus: list[str]) -> dict[str, str]:
    """What tells worker `index` of this machine from the others; `first` is the rank of its worker 0."""
    share = len(gpus) // num_workers
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])}
    ranks = {"RANK": str(first + index), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_workers)}
    return ranks | (own if gpus else {})


def exit_code(codes: list[int]) -> int:
    """Of all workers: 0 if one saw the set complete, else the first failure's."""
    if 0 in codes:
        return 0
    return codes[0] if codes[0] > 0 else 128 - codes[0]


def _wait(index: int, workers: Sequence[subprocess.Popen[bytes]]) -> int:
    code = workers[index].wait()
    if code not in STOPPED:
        how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
        others = any(worker.returncode is None for worker in workers)
        then = "; the others go on with its shards" if others else ""
        logger.warning("worker %d ended %s%s", index, how, then)
    return code


if __name__ == "__main__":
    run_command(extract_parser(), main)
