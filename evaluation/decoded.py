"""What decoding is asked for, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.cost import RoundCost
from ddtree.tree import DraftTree
from ddtree.walk import Accepted
from evaluation.clock import STAGES
from target.generate import Sampling


@dataclass(frozen=True)
class DecodeSettings:
    max_new_tokens: int
    """Of the whole response, prefill's token included."""
    eos_token_ids: tuple[int, ...]
    """The response ends with the first of these."""
    sampling: Sampling
    drafter_temperature: float | tuple[float, ...] = 1.0
    """Of all slots, or one a slot."""
    cost: RoundCost | None = None
    """For tree_cost."""
    seed: int = 0
    """Of a single prompt's samples; greedy decoding draws none."""


@dataclass(frozen=True)
class PassRecord:
    """One verify pass: the anchor's index in the response, the tree, and what the walk accepted before any cut."""

    anchor: int
    tree: DraftTree
    accepted: Accepted
    num_emitted: int


@dataclass(frozen=True)
class Decoded:
    """A response r_0..r_n and how it came about; `sum(passes) == len(tokens) - 1`."""

    tokens: list[int]
    passes: list[int]
    seconds: dict[str, float]
    """Per stage of STAGES, a round's time shared evenly by the rows decoded in it; `prefill` (the drafter's share included)
    stands beside them and is in no speed."""
    records: list[PassRecord]

    @property
    def decode_seconds(self) -> float:
        return sum(self.seconds[stage] for stage in STAGES)
