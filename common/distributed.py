"""Ranks: set-up from torchrun's or deepspeed's variables, sums over ranks, and stopping together."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.command import StoppedElsewhere
from common.lifeline import Lifeline


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> int:
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def distributed(cpu_threads: int, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """The ranks of this process, for a stage's whole life. One process needs no launcher and no process group.

    Under torchrun or deepspeed a gloo (CPU) or nccl (CUDA) group is made, and left on the way out so that no rank hangs. A
    rank that dies ends the others within seconds (common/lifeline.py).
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local} has no GPU: {torch.cuda.device_count()} visible; set NPROC to at most that"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads)
    if world > 1:
        # a rank has its own session: a killed launcher would leave it running, and the next start would meet it
        end_with_parent(os.getppid())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    rank = rank_from_environment()
    try:
        with Lifeline(rank, world) if world > 1 else contextlib.nullcontext():
            yield Ranks(rank, world, local, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end_with_parent(parent: int) -> None:
    """Ask Linux for SIGTERM when the process `parent`, which started this one, dies; at once if it already has."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)  # it died in between


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Element-wise sum over ranks, the same on every rank; the input itself in one process."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def raise_together(ranks: Ranks) -> Iterator[None]:
    """Every rank leaves this block with an error if one did, so that none waits for a rank that has stopped.

    The failing rank, the first if there are several, keeps its own error; the others raise StoppedElsewhere. It holds a
    collective: all ranks enter.
    """
    failure: BaseException | None = None
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        failure = error
    is_mistake = isinstance(failure, ValueError | OSError)  # else a fault of ours: exit code 1
    # the maximum of both: minus the first failing rank, and whether one was a fault of ours
    first = -ranks.rank if failure else -ranks.world_size
    flag = torch.tensor([first, float(failure is not None and not is_mistake)], device=ranks.device)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    rank, is_fault = -int(flag[0].item()), flag[1].item() > 0
    if failure is not None and (rank == ranks.rank or not is_mistake):
        raise failure
    if rank < ranks.world_size:
        raise StoppedElsewhere(rank, 1 if is_fault else 2) from failure
