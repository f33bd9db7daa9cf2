"""Live decoding beside the replay of the very same prompts: does the order of the losses hold when tokens are really decoded?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.acceptance import PromptPasses
from evaluation.bootstrap import interval
from train.ablation.judge import Judgement, read_judgement
from train.ablation.live import LiveJudgement, live_acceptors, read_live
from train.ablation.runs import AblationRun
from train.ablation.settings import Ablation
from train.ablation.table import change_cells, means_by_seed


@dataclass(frozen=True)
class LiveRow:
    """One variant decoded live by one acceptor, after the fit."""

    variant: str
    acceptor: str
    temperature: float
    """Of the target's samples."""
    num_prompts: int
    num_seeds: int
    live: float
    """Tokens a verify pass, macro mean over prompts, mean over seeds."""
    replay: float
    """The same prompts replayed."""
    relative: float
    """Live, over the baseline's live, minus 1."""
    relative_ci95: tuple[float, float] | None
    num_decodes: int
    num_as_replayed: int
    """Decodes whose passes are the replay's, pass for pass."""
    num_as_recorded: int
    """Decodes whose tokens are the record's; at temperature 0 that is losslessness."""


def live_rows(ablation: Ablation) -> list[LiveRow]:
    """Of every variant; empty if no live decoding is asked for."""
    if not ablation.live_prompts:
        return []
    found = {name: _read(ablation, name) for name in ablation.variants}
    return [
        _row(name, acceptor.key, found[name], found[ablation.baseline])
        for name in ablation.variants
        for acceptor in live_acceptors(ablation)
    ]


def live_markdown(ablation: Ablation, rows: Sequence[LiveRow]) -> str:
    """A table, and what agreed; nothing without rows."""
    if not rows:
        return ""
    keys = [acceptor.key for acceptor in live_acceptors(ablation)]
    cells = {(row.variant, row.acceptor): row for row in rows}
    head = [
        "loss",
        *(f"{key} {how}" for key in keys for how in ("replay", "live")),
        "change",
        "95 %",
    ]
    first = rows[0]
    lines = [
        "",
        f"**Live, after the fit**: {first.num_prompts} of these prompts decoded at T={first.temperature:g}; change of "
        f"`{keys[-1]}` live over `{ablation.baseline}`. {_agreement(rows)}",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for name in dict.fromkeys(row.variant for row in rows):
        row = cells[name, keys[-1]]
        means = [
            f"{v:.3f}" for key in keys for v in (cells[name, key].replay, cells[name, key].live)
        ]
        change = change_cells(row.relative, row.relative_ci95)
        lines.append("| " + " | ".join([f"`{name}`", *means, *change]) + " |")
    return "\n".join(lines) + "\n"


def _agreement(rows: Sequence[LiveRow]) -> str:
    total = sum(row.num_decodes for row in rows)
    replayed, recorded = (
        sum(values)
        for values in zip(*((r.num_as_replayed, r.num_as_recorded) for r in rows), strict=True)
    )
    return f"{replayed} of {total} decodes took the replay's passes, {recorded} gave the recorded tokens."


def _read(ablation: Ablation, name: str) -> list[tuple[Judgement, LiveJudgement]]:
    """A seed each."""
    runs = [AblationRun(ablation, name, seed) for seed in ablation.seeds]
    return [(read_judgement(run, "judge"), read_live(run)) for run in runs]


def _row(
    name: str,
    key: str,
    own: Sequence[tuple[Judgement, LiveJudgement]],
    base: Sequence[tuple[Judgement, LiveJudgement]],
) -> LiveRow:
    ours, others, replay = _of_shared_prompts(
        [live.of(key) for _, live in own],
        [live.of(key) for _, live in base],
        [_replayed(judgement, live, key) for judgement, live in own],
    )
    pairs = np.stack([others.mean(1), ours.mean(1)], 1)  # (prompts, 2)
    decodes = [
        (judgement.fitted[prompt][key], by_key[key], live.is_record[prompt][key])
        for judgement, live in own
        for prompt, by_key in live.passes.items()
    ]
    return LiveRow(
        variant=name,
        acceptor=key,
        temperature=own[0][1].temperature,
        num_prompts=len(pairs),
        num_seeds=len(own),
        live=float(ours.mean()),
        replay=float(replay.mean()),
        relative=float(pairs[:, 1].mean() / pairs[:, 0].mean() - 1),
        relative_ci95=interval(pairs, lambda means: means[:, 1] / means[:, 0] - 1),
        num_decodes=len(decodes),
        num_as_replayed=sum(replayed[: len(live)] == live for replayed, live, _ in decodes),
        num_as_recorded=sum(is_record for _, _, is_record in decodes),
    )


def _of_shared_prompts(*groups: list[list[PromptPasses]]) -> list[np.ndarray]:
    """(prompts, seeds) means of each group, of the prompts with a pass in all of them: a sampled decode may end at once."""
    everything = [passes for seeds in groups for passes in seeds]
    shared = set.intersection(*({p.prompt_id for p in found if p.passes} for found in everything))
    kept = [[[p for p in found if p.prompt_id in shared] for found in seeds] for seeds in groups]
    return [means_by_seed(seeds) for seeds in kept]


def _replayed(judgement: Judgement, live: LiveJudgement, key: str) -> list[PromptPasses]:
    """Of the prompts decoded live; a row of several responses has more passes than its first one decoded."""
    return [passes for passes in judgement.passes(key, True) if passes.prompt_id in live.passes]
