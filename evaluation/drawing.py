"""One real draft tree with its accepted path, as text: what the report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from evaluation.decode import PassRecord


@dataclass(frozen=True)
class DrawnTree:
    """Nodes with the root first; `accepted` are node indices, `bonus` the target's token after the last of them."""

    prompt_id: str
    texts: list[str]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    accepted: list[int]
    bonus: str


def draw_best_pass(
    tokenizer: PreTrainedTokenizerBase, prompt_id: str, records: Sequence[PassRecord]
) -> list[DrawnTree]:
    """The pass that shows most of what a tree is for, or nothing if there is no pass.

    That is the longest accepted path; of equal ones, the one that leaves the drafter's first choices most often.
    """

    def interest(record: PassRecord) -> tuple[int, int]:
        ranks = record.tree.child_ranks[record.accepted.nodes]
        return len(record.accepted.nodes), int((ranks > 0).sum())

    if not records:
        return []
    best = max(records, key=interest)
    texts = [str(tokenizer.decode([token])) for token in best.tree.tokens.tolist()]
    return [
        DrawnTree(
            prompt_id,
            texts,
            best.tree.parents.tolist(),
            best.tree.depths.tolist(),
            best.tree.log_probs.tolist(),
            best.accepted.nodes,
            str(tokenizer.decode([best.accepted.bonus])),
        )
    ]
