"""Numerators and denominators of everything replay measures: rows, chunks and ranks are added before anything is divided.

Axes: N anchors, A acceptors (by key), L = K-1 slots, R recall depths, P bins of path probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddtree.build import TreeBatch
from evaluation.acceptance import AcceptanceSums, PromptPasses, acceptance_sums
from evaluation.scores import SlotScores

RECALL_AT = (1, 4, 16, 64)
"""k of top-k recall: is the recorded token among the k likeliest of its slot, whatever came before it."""
BIN_EDGES = (
    *(0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
"""Of path probability; finer where a tree has most of its nodes."""
NUM_BINS = len(BIN_EDGES) - 1


@dataclass(frozen=True)
class AcceptorOutcome:
    """What one acceptor does at N anchors, were each the start of a pass."""

    accepted: Tensor
    """(N,) int64 draft tokens."""
    expected: Tensor
    """(N,) what the drafter expects of that: the sum of its nodes' path probabilities, over depths that have a record."""
    num_nodes: Tensor
    """(N,) int64 nodes to verify, without the root."""


@dataclass
class ReplaySums:
    """float64 tensors on the CPU; `flat` and `with_flat` are for reducing over ranks in one call."""

    acceptors: tuple[str, ...]
    """Keys of evaluation.acceptors.Acceptor."""
    acceptance: Tensor
    """(A, 4): the fields of AcceptanceSums."""
    labelled: Tensor
    """(L,): anchors whose slot has a recorded token."""
    survived: Tensor
    """(A, L): of those, anchors whose recorded prefix up to this slot is accepted."""
    recalled: Tensor
    """(R, L): of those, anchors whose recorded token is among the slot's k likeliest."""
    num_anchors: Tensor
    """(1,)"""
    predicted: Tensor
    """(A,): accepted tokens the drafter expects, over all anchors."""
    realised: Tensor
    """(A,): accepted tokens, over all anchors."""
    num_nodes: Tensor
    """(A,): nodes verified, over all anchors."""
    bins: Tensor
    """(P, 3): nodes of the largest tree by path probability: how many, their summed probability, how many were right."""

    @classmethod
    def zero(cls, acceptors: tuple[str, ...], num_slots: int) -> ReplaySums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return cls(
            acceptors,
            acceptance=zeros(len(acceptors), 4),
            labelled=zeros(num_slots),
            survived=zeros(len(acceptors), num_slots),
            recalled=zeros(len(RECALL_AT), num_slots),
            num_anchors=zeros(1),
            predicted=zeros(len(acceptors)),
            realised=zeros(len(acceptors)),
            num_nodes=zeros(len(acceptors)),
            bins=zeros(NUM_BINS, 3),
        )

    def add_anchors(
        self,
        scores: SlotScores,
        ranks: Tensor,
        outcomes: Mapping[str, AcceptorOutcome],
        trees: TreeBatch,
    ) -> None:
        """outcomes: of every acceptor, by key; ranks (N, L): of the recorded prefixes in `trees`, the largest budget's."""
        slots = torch.arange(1, len(self.labelled) + 1, device=ranks.device)
        labelled = slots <= scores.num_gold[:, None]  # (N, L)
        own = [outcomes[key] for key in self.acceptors]
        counts = torch.stack([outcome.accepted for outcome in own])  # (A, N)
        self.num_anchors += len(ranks)
        self.labelled += labelled.sum(0).cpu()
        self.survived += (counts[..., None] >= slots).sum(1).cpu()
        self.realised += counts.sum(1).cpu()
        self.predicted += torch.stack([outcome.expected.double().sum() for outcome in own]).cpu()
        self.num_nodes += torch.stack([outcome.num_nodes.sum() for outcome in own]).cpu()
        for index, k in enumerate(RECALL_AT):
            # the list holds max(RECALL_AT) children or the whole vocabulary
            self.recalled[index] += ((scores.gold_child_ranks < k) & labelled).sum(0).cpu()
        self._add_nodes(ranks, labelled, scores.num_gold, trees)

    def _add_nodes(
        self, ranks: Tensor, labelled: Tensor, num_gold: Tensor, trees: TreeBatch
    ) -> None:
        """Nodes deeper than the record's end can neither be right nor wrong: left out on both sides."""
        budget = trees.scores.shape[1]
        counted = recorded_nodes(trees, num_gold)
        probs = torch.where(counted, trees.scores.exp(), 0).double()  # (N, B)
        right = torch.zeros_like(counted)
        anchor, slot = torch.nonzero(labelled & (ranks <= budget), as_tuple=True)
        right[anchor, ranks[anchor, slot] - 1] = True
        edges = torch.tensor(BIN_EDGES[1:-1], dtype=torch.float64, device=probs.device)
        bin_of = torch.bucketize(probs, edges, right=True)[counted]
        values = torch.stack([torch.ones_like(probs), probs, right.double()], -1)[counted]
        self.bins += torch.zeros_like(self.bins).index_add_(0, bin_of.cpu(), values.cpu())

    def add_prompt(self, prompt: Sequence[PromptPasses]) -> None:
        """One prompt's passes, an acceptor each."""
        rows = [astuple(acceptance_sums([passes])) for passes in prompt]
        self.acceptance += torch.tensor(rows, dtype=torch.float64)

    def __iadd__(self, other: ReplaySums) -> ReplaySums:
        assert self.acceptors == other.acceptors
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
        return ReplaySums(self.acceptors, **shaped)

    def acceptance_of(self, key: str) -> AcceptanceSums:
        """Of one acceptor; has `macro` and `micro`."""
        found = self.acceptance[self.acceptors.index(key)]
        mean_sum, prompts, emitted, passes = found.tolist()
        return AcceptanceSums(mean_sum, round(prompts), round(emitted), round(passes))

    def to_json(self) -> dict[str, Any]:
        tensors = {name: self.__dict__[name].tolist() for name in _TENSORS}
        return {"acceptors": list(self.acceptors), **tensors}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ReplaySums:
        tensors = {name: torch.tensor(value[name], dtype=torch.float64) for name in _TENSORS}
        return cls(tuple(value["acceptors"]), **tensors)


def recorded_nodes(trees: TreeBatch, num_gold: Tensor) -> Tensor:
    """(N, B) bool: nodes at a depth that has a recorded token; padding is none."""
    places = torch.arange(trees.scores.shape[1], device=num_gold.device)
    return (places < trees.num_nodes[:, None]) & (trees.depths <= num_gold[:, None])


_TENSORS = tuple(field.name for field in fields(ReplaySums) if field.name != "acceptors")
