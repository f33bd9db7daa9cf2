"""A proposer that knows the answers and errs at a controlled rate: drafts that are right as often as a test needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddtree.cost import RoundCost
from evaluation.acceptors import (
    CHAIN,
    CHAIN_REJECTION,
    Acceptor,
    cost_acceptor,
    spine_acceptor,
    tree_acceptor,
)

COST = RoundCost(tuple(1.0 + 0.03 * n for n in range(41)))
ACCEPTORS: tuple[Acceptor, ...] = (
    CHAIN,
    CHAIN_REJECTION,
    tree_acceptor(12),
    spine_acceptor(12),
    cost_acceptor(40),
)


class Oracle:
    """A Proposer over known responses: each slot's recorded token is its first choice with probability `accuracy`, else
    one of the next few or absent, by the place in the response alone.

    responses: by length of the prompt, which tells the prompts of a test apart.
    """

    def __init__(
        self,
        responses: Mapping[int, Sequence[int]],
        accuracy: float,
        vocabulary: int,
        num_rows: int = 1,
        num_slots: int = 5,
    ):
        self.responses, self.accuracy = responses, accuracy
        self.vocabulary, self.num_slots = vocabulary, num_slots
        self.rows: list[tuple[int, int]] = [(0, 0)] * num_rows  # prompt length, committed tokens

    def start(self, row: int, features: Tensor) -> None:
        self.rows[row] = (len(features), 0)

    def append(self, row_features: Sequence[Tensor | None]) -> None:
        for row, features in enumerate(row_features):
            length, committed = self.rows[row]
            self.rows[row] = (length, committed + (0 if features is None else len(features)))

    def top(self, anchors: Sequence[int], num_children: int) -> tuple[Tensor, Tensor]:
        log_probs = self.probs(anchors).log()
        found = log_probs.sort(dim=-1, descending=True, stable=True)
        count = min(num_children, self.vocabulary)
        return found.values[..., :count], found.indices[..., :count]

    def probs(self, anchors: Sequence[int]) -> Tensor:
        return torch.stack([self._block(*row) for row in self.rows])

    def _block(self, length: int, committed: int) -> Tensor:
        """(L, V) for the block whose anchor is the response's token `committed`."""
        response = self.responses.get(length, [])
        generator = torch.Generator().manual_seed(1000 * length + committed)
        logits = torch.randn(self.num_slots, self.vocabulary, generator=generator)
        draws = torch.rand(self.num_slots, 2, generator=generator).tolist()
        for slot, (draw, how) in enumerate(draws):
            place = committed + 1 + slot
            if place < len(response) and (draw < self.accuracy or how < 0.7):
                logits[slot, response[place]] = 8.0 if draw < self.accuracy else 2.6
        return logits.softmax(-1)
