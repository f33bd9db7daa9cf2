"""What the head costs: the tree loss and cross-entropy through `sparse_log_probs`, against chunked and full logits.

    python -m bench.head [--full] [--output outputs/bench/head.json]

All four give the gradient of the hidden states; it is checked that ours equals theirs for cross-entropy. `full logits` is
log_softmax of all rows under autograd; `chunked` is the same in chunks of as many rows as ours has alive, which is what
trainers do that mind memory. Times alternate in one process (median of rounds); memory is the resident peak above what was
there before, each in a process of its own. Some 20 seconds on two idle cores; --full adds the mission's vocabulary of
248,320 x 1,024 hidden and 1,020 rows: some minutes and 6 GB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.memory import peak_above_bytes
from common.files import write_json
from configs.schema import LossName
from drafter.head import CPU_CHUNK_BYTES, MIN_CHUNK_ROWS
from drafter.masks import BlockLayout
from train.batches import MicroBatch
from train.losses import LossMix
from train.objective import micro_batch_loss
from train.schedule import LossPhase

BLOCK_SIZE, BUDGET = 16, 64
SMALL, MISSION = (49_152, 576, 510), (248_320, 1024, 1020)


@dataclass(frozen=True)
class Problem:
    """Rows of hidden states and a head whose softmax is neither flat nor certain."""

    hidden: Tensor  # (R, H), differentiable
    head: Tensor  # (V, H)
    labels: Tensor  # (R,)

    @classmethod
    def of(cls, vocabulary: int, size: int, rows: int) -> Problem:
        generator = torch.Generator().manual_seed(0)
        head = torch.empty(vocabulary, size).normal_(std=size**-0.5, generator=generator)
        labels = torch.randint(vocabulary, (rows,), generator=generator)
        noise = torch.randn(rows, size, generator=generator)
        # the label's own row in it: losses of a few nats, as in training
        hidden = 8 * head[labels] + 2 * noise
        return cls(hidden.requires_grad_(), head, labels)

    @property
    def chunk_rows(self) -> int:
        return max(MIN_CHUNK_ROWS, CPU_CHUNK_BYTES // (4 * len(self.head)))


@dataclass(frozen=True)
class Row:
    case: str
    vocabulary: int
    hidden: int
    rows: int
    seconds: float
    peak_mb: float
    time_over_chunked: float
    cpu_over_chunked: float
    """The same in processor time, which other work on the machine hardly disturbs."""
    memory_over_full: float


def full_logits(problem: Problem) -> Tensor:
    loss = F.cross_entropy(problem.hidden @ problem.head.T, problem.labels, reduction="sum")
    return torch.autograd.grad(loss, problem.hidden)[0]


def chunked_logits(problem: Problem) -> Tensor:
    parts = []
    for rows, labels in zip(
        problem.hidden.split(problem.chunk_rows),
        problem.labels.split(problem.chunk_rows),
        strict=True,
    ):
        own = rows.detach().requires_grad_()
        loss = F.cross_entropy(own @ problem.head.T, labels, reduction="sum")
        parts.append(torch.autograd.grad(loss, own)[0])
    return torch.cat(parts)


def ours(problem: Problem, loss: LossName) -> Tensor:
    """Through the trainer's own objective: blocks of 15 slots, trees of 64 nodes, weights and sums included."""
    slots = BLOCK_SIZE - 1
    blocks = len(problem.labels) // slots
    labels = problem.labels.view(1, blocks, slots)
    place = torch.zeros(1, blocks, dtype=torch.int64)
    batch = MicroBatch(
        torch.zeros(1, 1, 1, 1), BlockLayout(place[:, :1], place[:, :1], place, place), place, labels,
        torch.ones_like(labels, dtype=torch.bool), ("bench",), 0,
    )  # fmt: skip
    hidden = problem.hidden.view(1, blocks, slots, -1)
    hidden = F.pad(hidden, (0, 0, 1, 0))  # the anchor's slot
    # a decay so slow that the weights of `ce` are 1: the same loss as the others'
    mix = LossMix({loss: 1.0}, gamma=1e12, tree_budget=BUDGET)
    value, _ = micro_batch_loss(hidden, problem.head, batch, mix, LossPhase(), 1.0, 1024)
    return torch.autograd.grad(value, problem.hidden)[0]


CASES: dict[str, Callable[[Problem], Tensor]] = {
    "full logits, cross-entropy": full_logits,
    "chunked logits, cross-entropy": chunked_logits,
    "ours, ce": lambda problem: ours(problem, "ce"),
    "ours, tree of 64": lambda problem: ours(problem, "tree"),
}
FULL, CHUNKED, *_ = CASES


def measure(shape: tuple[int, int, int], rounds: int, threads: int) -> list[Row]:
    problem = Problem.of(*shape)
    wanted = chunked_logits(problem)
    assert torch.allclose(ours(problem, "ce"), wanted, atol=1e-4), "not the same gradient"
    times: dict[str, list[Tensor]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case, took in times.items():
            if case != FULL or number == 0:  # once: only its memory is compared
                took.append(seconds_of(CASES[case], problem))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(case, shape, threads) for case in CASES]
        peaks = dict(zip(CASES, pool.starmap(peak_of, jobs, chunksize=1), strict=True))
    wall = {case: torch.stack(took).median(0).values for case, took in times.items()}
    ratios = {
        case: torch.stack([a / b for a, b in zip(took, times[CHUNKED], strict=False)])
        .median(0)
        .values.tolist()
        for case, took in times.items()
    }
    return [
        Row(
            case,
            *shape,
            seconds=round(wall[case][0].item(), 2),
            peak_mb=round(peaks[case] / 1e6, 1),
            time_over_chunked=round(ratios[case][0], 3),
            cpu_over_chunked=round(ratios[case][1], 3),
            memory_over_full=round(peaks[case] / peaks[FULL], 4),
        )
        for case in CASES
    ]


def seconds_of(run: Callable[[Problem], Tensor], problem: Problem) -> Tensor:
    """(2,): wall clock and processor time of all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    run(problem)
    return torch.tensor([time.perf_counter() - start, time.process_time() - cpu])


def peak_of(case: str, shape: tuple[int, int, int], threads: int) -> int:
    torch.set_num_threads(threads)
    tiny, problem = Problem.of(1000, 64, 30), Problem.of(*shape)
    CASES[case](tiny)  # what a first call loads is not counted
    return peak_above_bytes(lambda: CASES[case](problem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="also V = 248,320, H = 1,024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/head.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = [SMALL, MISSION] if options.full else [SMALL]
    rows = [row for shape in shapes for row in measure(shape, options.rounds, options.threads)]
    machine = f"{os.cpu_count()} cores, {options.threads} torch threads, torch {torch.__version__}"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        options.output, {"name": "head", "machine": machine, "rows": [asdict(r) for r in rows]}
    )
    print(f"head on {machine}")
    print(
        f"{'case':<31}{'V':>8}{'H':>6}{'rows':>6}{'s':>8}{'peak MB':>9}{'time/chunked':>14}{'cpu/chunked':>13}{'memory/full':>13}"
    )
    for row in rows:
        print(
            f"{row.case:<31}{row.vocabulary:>8}{row.hidden:>6}{row.rows:>6}{row.seconds:>8}{row.peak_mb:>9}"
            f"{row.time_over_chunked:>14}{row.cpu_over_chunked:>13}{row.memory_over_full:>13}"
        )
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
