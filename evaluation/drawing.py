"""A few real verify passes as text: what the report draws as trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from evaluation.decoded import Decoded, PassRecord

CONTEXT_TOKENS = 24


@dataclass(frozen=True)
class DrawnTree:
    """Nodes in the total order, root first; `accepted` are node indices, `bonus` the token after the last of them."""

    prompt_id: str
    acceptor: str
    """Key."""
    kind: str
    """`longest` or `typical` pass of its prompt."""
    context: str
    """The text just before the anchor."""
    texts: list[str]
    parents: list[int]
    depths: list[int]
    child_ranks: list[int]
    """0: the drafter's first choice at that depth."""
    log_probs: list[float]
    accepted: list[int]
    bonus: str
    num_emitted: int
    """Tokens the pass yields; fewer than accepted nodes say where the response ends inside the tree."""


def draw_passes(
    tokenizer: PreTrainedTokenizerBase,
    prompt_id: str,
    prompt: Sequence[int],
    acceptor: str,
    decoded: Decoded,
) -> list[DrawnTree]:
    """The longest pass of a decode and a typical one (the median by emitted tokens); nothing if it has no pass.

    Of equally long passes the one that leaves the drafter's first choices most often: it shows what a tree is for.
    """
    if not decoded.records:
        return []

    def interest(record: PassRecord) -> tuple[int, int]:
        ranks = record.tree.child_ranks[record.accepted.nodes]
        return len(record.accepted.nodes), int((ranks > 0).sum())

    ordered = sorted(decoded.records, key=interest)
    chosen = {"longest": ordered[-1], "typical": ordered[len(ordered) // 2]}
    return [
        _drawn(
            tokenizer,
            prompt_id,
            [*prompt, *decoded.tokens[: record.anchor]],
            acceptor,
            kind,
            record,
        )
        for kind, record in chosen.items()
    ]


def _drawn(
    tokenizer: PreTrainedTokenizerBase,
    prompt_id: str,
    before: Sequence[int],
    acceptor: str,
    kind: str,
    record: PassRecord,
) -> DrawnTree:
    tree = record.tree
    return DrawnTree(
        prompt_id,
        acceptor,
        kind,
        str(tokenizer.decode(list(before[-CONTEXT_TOKENS:]))),
        [str(tokenizer.decode([token])) for token in tree.tokens.tolist()],
        tree.parents.tolist(),
        tree.depths.tolist(),
        tree.child_ranks.tolist(),
        tree.log_probs.tolist(),
        record.accepted.nodes,
        str(tokenizer.decode([record.accepted.bonus])),
        record.num_emitted,
    )
