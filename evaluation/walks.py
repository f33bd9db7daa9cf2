"""What the target says to the trees of a pass, row by row: its tokens, the walk, or the rejection sampler.

Every row draws from a generator of its own, and as many numbers as it would alone: company changes nothing.
R rows, T nodes of the largest tree, L = K-1 slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.rejection import walk_by_rejection
from ddtree.tree import DraftTree, chain_tree
from ddtree.walk import Accepted, walk_tree
from target.generate import Sampling, choose, sampling_probs

Generators = Sequence[torch.Generator | None]
"""One a row, None for an idle one."""


def walk_rows(
    trees: Sequence[DraftTree | None], logits: Tensor, sampling: Sampling, generators: Generators
) -> list[Accepted | None]:
    """One token a node from the target's distribution there, of which the walk uses those on its way.

    logits: (R, T, V). Greedy or not, the tokens of all rows leave the device in one transfer.
    """
    if sampling.temperature == 0:
        chosen = choose(logits, sampling, None).cpu()  # (R, T)
        rows = [chosen[row, : len(tree)] if tree else None for row, tree in enumerate(trees)]
    else:
        drawn = [
            choose(logits[row, : len(tree)], sampling, generator)
            for row, (tree, generator) in enumerate(zip(trees, generators, strict=True))
            if tree
        ]
        parts = iter(torch.cat(drawn).cpu().split([len(part) for part in drawn]))
        rows = [next(parts) if tree else None for tree in trees]
    return [
        None if tree is None or tokens is None else walk_tree(tree, tokens)
        for tree, tokens in zip(trees, rows, strict=True)
    ]


def draw_chains(
    anchors: Sequence[int], probs: Tensor, generators: Generators
) -> list[DraftTree | None]:
    """A chain a row whose tokens are drawn from the drafter's distributions (R, L, V)."""
    return [
        None if generator is None else chain_tree(_draw(anchor, probs[row], generator))
        for row, (anchor, generator) in enumerate(zip(anchors, generators, strict=True))
    ]


def walk_rows_by_rejection(
    trees: Sequence[DraftTree | None],
    drafter_probs: Tensor,
    logits: Tensor,
    sampling: Sampling,
    generators: Generators,
) -> list[Accepted | None]:
    """trees: of `draw_chains` with drafter_probs (R, L, V); logits: (R, K, V)."""
    return [
        None
        if tree is None
        else walk_by_rejection(
            sampling_probs(logits[row], sampling),
            drafter_probs[row].to(logits.device),
            tree.tokens[1:].to(logits.device),
            generator,
        )
        for row, (tree, generator) in enumerate(zip(trees, generators, strict=True))
    ]


def _draw(anchor: int, probs: Tensor, generator: torch.Generator) -> Tensor:
    """(K,) the anchor and one token a slot."""
    drafted = torch.multinomial(probs.to(generator.device), 1, generator=generator)[:, 0].cpu()
    return torch.cat([torch.tensor([anchor]), drafted])
