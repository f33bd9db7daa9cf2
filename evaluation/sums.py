"""Numerators and denominators of everything replay measures: rows, chunks and ranks are added before anything is divided.

Axes: A acceptors (the chain, then each budget), L = K-1 slots, R recall depths, 10 bins of probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddtree.build import TreeBatch
from evaluation.acceptance import AcceptanceSums, PromptPasses, acceptance_sums
from evaluation.scores import SlotScores

RECALL_AT = (1, 4, 16, 64)
"""k of top-k recall: is the recorded token among the k likeliest of its slot, whatever came before it."""
NUM_BINS = 10


@dataclass
class ReplaySums:
    """float64 tensors on the CPU; `flat` and `with_flat` are for reducing over ranks in one call."""

    budgets: tuple[int, ...]
    acceptance: Tensor
    """(A, 4): the fields of AcceptanceSums."""
    labelled: Tensor
    """(L,): anchors whose slot has a recorded token."""
    survived: Tensor
    """(A, L): of those, anchors whose recorded prefix up to this slot is in the tree."""
    recalled: Tensor
    """(R, L): of those, anchors whose recorded token is among the slot's k likeliest."""
    num_anchors: Tensor
    """(1,)"""
    predicted: Tensor
    """(A,): accepted tokens the drafter expects, the sum of its nodes' path probabilities."""
    realised: Tensor
    """(A,): accepted tokens."""
    bins: Tensor
    """(10, 3): nodes of the largest tree by path probability: how many, their summed probability, how many were right."""

    @classmethod
    def zero(cls, budgets: tuple[int, ...], num_slots: int) -> ReplaySums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        acceptors = len(budgets) + 1
        return cls(
            budgets,
            acceptance=zeros(acceptors, 4),
            labelled=zeros(num_slots),
            survived=zeros(acceptors, num_slots),
            recalled=zeros(len(RECALL_AT), num_slots),
            num_anchors=zeros(1),
            predicted=zeros(acceptors),
            realised=zeros(acceptors),
            bins=zeros(NUM_BINS, 3),
        )

    def add_anchors(
        self, scores: SlotScores, ranks: Tensor, accepted: Sequence[Tensor], trees: TreeBatch
    ) -> None:
        """accepted: (N,) an acceptor; trees: the largest budget's, whose first B nodes are the tree of budget B."""
        slots = torch.arange(1, len(self.labelled) + 1, device=ranks.device)
        labelled = slots <= scores.num_gold[:, None]  # (N, L)
        counts = torch.stack(list(accepted))  # (A, N)
        self.num_anchors += len(ranks)
        self.labelled += labelled.sum(0).cpu()
        self.survived += (counts[..., None] >= slots).sum(1).cpu()
        self.realised += counts.sum(1).cpu()
        for index, k in enumerate(RECALL_AT):
            # the list holds max(RECALL_AT) children or the whole vocabulary
            self.recalled[index] += ((scores.gold_child_ranks < k) & labelled).sum(0).cpu()
        self._add_calibration(scores, ranks, labelled, trees)

    def _add_calibration(
        self, scores: SlotScores, ranks: Tensor, labelled: Tensor, trees: TreeBatch
    ) -> None:
        """Nodes deeper than the record's end can neither be right nor wrong: left out on both sides."""
        budget = trees.scores.shape[1]
        places = torch.arange(budget, device=ranks.device)
        counted = (places < trees.num_nodes[:, None]) & (trees.depths <= scores.num_gold[:, None])
        probs = torch.where(counted, trees.scores.exp(), 0).double()  # (N, B)
        chain = scores.top_log_probs[..., 0].cumsum(1).exp().double()
        self.predicted[0] += (chain * labelled).sum().cpu()
        for index, size in enumerate(self.budgets, start=1):
            self.predicted[index] += probs[:, :size].sum().cpu()
        right = torch.zeros_like(counted)
        anchor, slot = torch.nonzero(labelled & (ranks <= budget), as_tuple=True)
        right[anchor, ranks[anchor, slot] - 1] = True
        bin_of = (probs * NUM_BINS).long().clamp(max=NUM_BINS - 1)[counted]
        values = torch.stack([torch.ones_like(probs), probs, right.double()], -1)[counted]
        self.bins += torch.zeros_like(self.bins).index_add_(0, bin_of.cpu(), values.cpu())

    def add_prompt(self, prompt: Sequence[PromptPasses]) -> None:
        """One prompt's passes, an acceptor each."""
        rows = [astuple(acceptance_sums([passes])) for passes in prompt]
        self.acceptance += torch.tensor(rows, dtype=torch.float64)

    def __iadd__(self, other: ReplaySums) -> ReplaySums:
        assert self.budgets == other.budgets
        for name in _TENSORS:
            self.__dict__[name] += other.__dict__[name]
        return self

    def flat(self) -> Tensor:
        """One float64 vector: `sums.with_flat(sum_over_ranks(sums.flat()))` is the sum over ranks."""
        return torch.cat([self.__dict__[name].flatten() for name in _TENSORS])

    def with_flat(self, values: Tensor) -> ReplaySums:
        """The sums whose `flat` is `values`."""
        own = [self.__dict__[name] for name in _TENSORS]
        parts = values.cpu().split([tensor.numel() for tensor in own])
        shaped = {n: p.view_as(t) for n, p, t in zip(_TENSORS, parts, own, strict=True)}
        return ReplaySums(self.budgets, **shaped)

    def acceptance_of(self, budget: int | None) -> AcceptanceSums:
        """Of the chain (None) or the tree at `budget`; has `macro` and `micro`."""
        index = 0 if budget is None else 1 + self.budgets.index(budget)
        mean_sum, prompts, emitted, passes = self.acceptance[index].tolist()
        return AcceptanceSums(mean_sum, round(prompts), round(emitted), round(passes))

    def to_json(self) -> dict[str, Any]:
        tensors = {name: self.__dict__[name].tolist() for name in _TENSORS}
        return {"budgets": list(self.budgets), **tensors}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ReplaySums:
        tensors = {name: torch.tensor(value[name], dtype=torch.float64) for name in _TENSORS}
        return cls(tuple(value["budgets"]), **tensors)


_TENSORS = tuple(field.name for field in fields(ReplaySums) if field.name != "budgets")
