"""What a round costs on this machine, by the number of draft nodes: measured once in a few rounds, then kept.

tree_cost decides by it and the report models speeds from it, so every rank and every resumed run must read the same
numbers: they are measured by one rank, saved, and read from the file. Rounds of all sizes take turns and a size's cost is
the median of its rounds, so that a slow moment of the machine does not fall on one size.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import fields_of, read_json
from common.progress import Progress
from ddtree.build import build_tree
from ddtree.convex import fit_convex
from ddtree.cost import RoundCost
from ddtree.order import MAX_BUDGET
from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from evaluation.clock import StageClock
from evaluation.drafting import Proposer
from evaluation.speed import RoundSeconds
from evaluation.walks import walk_rows
from target.generate import Sampling

NUM_ROUNDS = 7
"""Measured rounds a size; one more, the first, warms up."""


@dataclass(frozen=True)
class CostPoint:
    """Median seconds of rounds with that many draft nodes a row."""

    num_nodes: int
    draft: float
    build: float
    verify: float
    commit: float
    rest: float
    """The target's choices and the walk."""

    @property
    def is_sound(self) -> bool:
        stages = (self.draft, self.build, self.commit, self.rest)
        return 0 < self.verify < math.inf and all(0 <= spent < math.inf for spent in stages)

    @property
    def after_draft(self) -> float:
        return self.build + self.verify + self.commit + self.rest


@dataclass(frozen=True)
class MeasuredCost:
    """Points from 0 nodes (plain decoding, with a draft) to the largest budget."""

    points: tuple[CostPoint, ...]
    num_sequences: int
    """Rows decoded together."""
    machine: str

    @property
    def is_sound(self) -> bool:
        """Whether a measurement can have given this: sizes that rise from 0 to what a tree may have, and finite seconds."""
        sizes = [point.num_nodes for point in self.points]
        return (
            len(sizes) > 1
            and sizes[0] == 0
            and sizes[-1] <= MAX_BUDGET
            and all(isinstance(size, int) for size in sizes)
            and all(a < b for a, b in itertools.pairwise(sizes))
            and all(point.is_sound for point in self.points)
        )

    @property
    def plain_step(self) -> float:
        """Seconds of a plain step: a verify pass of the anchor alone, no draft."""
        first = self.points[0]
        return first.verify + first.commit + first.rest

    @property
    def draft(self) -> float:
        """Seconds of a draft, whatever becomes of it."""
        return statistics.median(point.draft for point in self.points)

    def round_cost(self) -> RoundCost:
        """Draft, and the rising convex fit of everything else."""
        fitted = fit_convex(
            [point.num_nodes for point in self.points],
            [point.after_draft for point in self.points],
        )
        return RoundCost(tuple((self.draft + fitted).tolist()))

    def round_seconds(self) -> RoundSeconds:
        """The same for the report's modelled speeds."""
        return RoundSeconds(self.plain_step, self.round_cost().seconds)

    def to_json(self) -> dict[str, Any]:
        """With the fit beside the points, for a reader's eye."""
        return asdict(self) | {
            "points": [asdict(point) for point in self.points],
            "plain_step": self.plain_step,
            "fitted_round": list(self.round_cost().seconds),
        }


def read_costs(path: Path) -> MeasuredCost:
    """Raises FileNotFoundError or ValueError in one line."""
    remedy = "remove it and run `./launch.sh evaluate` again, or set evaluation.cost_file to another evaluation's costs.json"
    value = read_json(path, remedy)
    with fields_of(path, remedy):
        points = tuple(CostPoint(**point) for point in value["points"])
        cost = MeasuredCost(points, value["num_sequences"], value["machine"])
        is_sound = cost.is_sound
    if not is_sound:
        raise ValueError(f"{path} holds sizes or seconds that no measurement gives; {remedy}")
    return cost


def measure_costs(
    verifier: TreeVerifier, proposer: Proposer, prompt: Tensor, max_budget: int
) -> MeasuredCost:
    """Rounds of 0, 1, 2, 4, ... max_budget draft nodes after `prompt` (S,), the same in every row of the verifier.

    The proposer needs room for `rounds_needed(max_budget)` more tokens.
    """
    clock, rows = StageClock(prompt.device), len(verifier.lengths)
    for row in range(rows):
        proposer.start(row, verifier.prefill(prompt, row).features)
    sizes = _sizes(max_budget)
    progress = Progress("measuring round costs", (NUM_ROUNDS + 1) * len(sizes), "rounds")
    laps: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(NUM_ROUNDS + 1):
        for size in sizes:
            laps[size].append(_round(verifier, proposer, clock, int(prompt[-1]), size))
            progress.advance()
    progress.finish()
    points = [_point(size, found[1:]) for size, found in laps.items()]
    return MeasuredCost(tuple(points), rows, _machine(prompt.device))


def rounds_needed(max_budget: int) -> int:
    """Rounds that `measure_costs` decodes, a token each."""
    return (NUM_ROUNDS + 1) * len(_sizes(max_budget))


def _sizes(max_budget: int) -> list[int]:
    powers = [2**k for k in range(max_budget.bit_length())]
    return [0, *(size for size in powers if size < max_budget), max_budget]


def _round(
    verifier: TreeVerifier, proposer: Proposer, clock: StageClock, anchor: int, size: int
) -> dict[str, float]:
    """One round as decoding runs it, of which the root alone is committed."""
    rows = range(len(verifier.lengths))
    clock.lap()
    with clock("draft"):
        log_probs, ids = proposer.top([anchor for _ in rows], max(size, 1))
    with clock("build"):
        trees = [_tree(anchor, log_probs[row], ids[row], size) for row in rows]
    with clock("verify"):
        output = verifier.verify(trees)
    walk_rows(trees, output.logits, Sampling(), [None for _ in rows])
    with clock("commit"):
        verifier.commit([[0] for _ in rows])
    with clock("draft"):
        proposer.append([output.features[row, :1] for row in rows])
    return clock.lap()


def _tree(anchor: int, log_probs: Tensor, ids: Tensor, size: int) -> DraftTree:
    return build_tree(anchor, log_probs, ids, size) if size else chain_tree(torch.tensor([anchor]))


def _point(size: int, laps: Sequence[dict[str, float]]) -> CostPoint:
    return CostPoint(
        size, **{stage: statistics.median(lap[stage] for lap in laps) for stage in laps[0]}
    )


def _machine(device: torch.device) -> str:
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{chip}, {torch.get_num_threads()} torch threads, torch {torch.__version__}"
