"""Evaluations without a model: blocks of a made-up drafter, records drawn from its own distribution or a flatter one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree.build import build_trees
from ddtree.cost import RoundCost
from ddtree.replay import ranks_in, replay_walk
from evaluation.acceptance import PromptPasses
from evaluation.child_ranks import replay_child_ranks
from evaluation.clock import STAGES
from evaluation.drawing import DrawnTree
from evaluation.live import LiveDecode, LiveRecord
from evaluation.outcomes import anchor_outcomes
from evaluation.parity import Parity
from evaluation.replay import ReplayOptions, RowReplay
from evaluation.report import Identity, Measured, Settled
from evaluation.scores import SlotScores
from evaluation.speed import RoundSeconds
from evaluation.sums import ReplaySums

NUM_SLOTS, VOCABULARY = 4, 24
COST = RoundCost(tuple(1.0 + 0.02 * n for n in range(17)))
OPTIONS = ReplayOptions(
    (2, 4, 8, 16), names=("chain", "tree", "tree_spine", "tree_cost"), cost=COST
)
SETTINGS = {"target weights": "w", "evaluation.max_new_tokens": 64, "evaluation.dtype": "float32"}


def draw_scores(seed: int, num_anchors: int, flatness: float = 1.0) -> SlotScores:
    """The recorded tokens are drawn from the drafter's logits / flatness: 1 is a true drafter, more an over-confident one."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_anchors, NUM_SLOTS, VOCABULARY, generator=generator)
    top = logits.log_softmax(-1).sort(-1, descending=True)
    truth = (top.values / flatness).softmax(-1).flatten(0, 1)
    gold = torch.multinomial(truth, 1, generator=generator).view(num_anchors, NUM_SLOTS)
    left = num_anchors - torch.arange(num_anchors)
    return SlotScores(
        top.values, top.values.gather(2, gold[..., None])[..., 0], gold, left.clamp(max=NUM_SLOTS)
    )


def replay_scores(prompt_id: str, task: str, scores: SlotScores) -> RowReplay:
    """One prompt of one response, as evaluation.replay makes it from these scores."""
    trees = build_trees(scores.top_log_probs, OPTIONS.max_budget)
    ranks = ranks_in(trees, scores.gold_child_ranks, scores.num_gold)
    outcomes = anchor_outcomes(scores, trees, ranks, OPTIONS.acceptors, OPTIONS.cost)
    sums = empty_sums()
    sums.add_anchors(scores, ranks, outcomes, trees)
    passes, child_ranks, gold = {}, {}, scores.gold_child_ranks.tolist()
    for key, outcome in outcomes.items():
        counts = outcome.accepted.tolist()
        passes[key] = replay_walk(counts, len(counts))
        child_ranks[key] = replay_child_ranks(gold, counts, passes[key])
    sums.add_prompt([PromptPasses(prompt_id, task, tuple(found)) for found in passes.values()])
    return RowReplay(prompt_id, task, passes, child_ranks, sums)


def empty_sums() -> ReplaySums:
    return ReplaySums.zero(tuple(a.key for a in OPTIONS.acceptors), NUM_SLOTS)


def decode_live(row: RowReplay, temperature: float = 0.0) -> LiveRecord:
    """The replayed passes as if decoded, 10 ms a plain step and 20 ms a round."""
    length = sum(row.passes["chain"])
    decodes = [
        LiveDecode(
            "plain", None, temperature, [1] * length, [[]] * length, _spent(0.01 * length), None
        )
    ]
    for acceptor in OPTIONS.acceptors:
        passes = row.passes[acceptor.key]
        ranks = row.child_ranks[acceptor.key]
        spent = _spent(0.02 * len(passes))
        decodes.append(
            LiveDecode(acceptor.name, acceptor.budget, temperature, passes, ranks, spent, None)
        )
    num_passes = sum(len(passes) for passes in row.passes.values())
    return LiveRecord(
        row.prompt_id, row.task, decodes, Parity(num_passes, num_passes, [], row.passes)
    )


def _spent(seconds: float) -> dict[str, float]:
    return {stage: seconds / len(STAGES) for stage in STAGES} | {"prefill": 1.0}


@dataclass(frozen=True)
class Made:
    identity: Identity
    measured: Measured


def make_evaluation(
    *,
    flatness: float = 1.5,
    num_prompts: int = 20,
    num_live: int = 6,
    tasks: tuple[str, ...] = ("chat", "code"),
    run: str = "made",
    has_cost: bool = True,
    has_fit: bool = False,
) -> Made:
    """Lengths of the records depend on the prompt alone, so evaluations of two drafters compare."""
    replayed = [
        replay_scores(f"prompt-{i:03}", tasks[i % len(tasks)], draw_scores(i, 12 + i, flatness))
        for i in range(num_prompts)
    ]
    if has_fit:
        replayed = [
            RowReplay(r.prompt_id, r.task, r.passes, r.child_ranks, r.sums, r.sums)
            for r in replayed
        ]
    sums = empty_sums()
    for row in replayed:
        sums += row.sums
    live = [decode_live(row) for row in replayed[:num_live]]
    cost = RoundSeconds(0.01, tuple(0.02 + 0.001 * n for n in range(17))) if has_cost else None
    facts = {"run": run, "target": "target", "drafter": f"drafter of {run}"}
    fit = {
        "temperatures": [1.1] * NUM_SLOTS,
        "nll_before": [2.0] * NUM_SLOTS,
        "nll_after": [1.9] * NUM_SLOTS,
        "num_tokens": [9] * NUM_SLOTS,
        "fitted_on": {"split": "validation", "num_rows": 3, "rows": "r"},
    }
    costs = {"machine": "a machine"}
    settled = Settled(fit if has_fit else None, costs if has_cost else None)
    identity = Identity("t" * 64, run.ljust(64, "0"), "c" * 64, SETTINGS, facts)
    return Made(identity, Measured(OPTIONS, replayed, live, sums, 0.0, cost, settled))


def drawn_tree(texts: list[str] | None = None, kind: str = "longest") -> DrawnTree:
    """Root, two children, one grandchild; the second child is accepted, the grandchild too."""
    return DrawnTree(
        "prompt-0", "tree-3", kind, "before", texts or ["a", "b", "c", "d"], [-1, 0, 0, 2], [0, 1, 1, 2],
        [0, 0, 1, 0], [0.0, -0.5, -1.0, -2.0], [0, 2, 3], "bonus", 3,
    )  # fmt: skip
