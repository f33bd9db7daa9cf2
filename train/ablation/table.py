"""From judgements to a table: each variant against the baseline, paired by prompt, averaged over seeds first.

A prompt's acceptance length of a variant is the mean over its seeds; the interval is a bootstrap over prompts (95 %, paired).
Seeds are few, so their spread is shown as it is: the difference of every seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from evaluation.acceptance import PromptPasses, prompt_means
from evaluation.acceptors import CHAIN, tree_acceptor
from evaluation.bootstrap import interval
from train.ablation.judge import Judgement, PromptSet, read_judgement
from train.ablation.runs import AblationRun
from train.ablation.settings import Ablation


@dataclass(frozen=True)
class AblationRow:
    """One variant under one acceptor."""

    variant: str
    acceptor: str
    fitted: bool
    """After the temperature fit of each run; the chain does not change by it."""
    num_prompts: int
    num_seeds: int
    acceptance: float
    """Tokens a verify pass, macro mean over prompts, mean over seeds."""
    relative: float
    """Over the baseline's, minus 1."""
    relative_ci95: tuple[float, float] | None
    relative_by_seed: tuple[float, ...]
    micro: float
    """Tokens a verify pass, all emitted tokens over all passes of all seeds: what throughput follows."""
    micro_relative: float
    micro_relative_ci95: tuple[float, float] | None


def ablation_rows(ablation: Ablation, prompts: PromptSet) -> list[AblationRow]:
    """Of every variant whose judgements are all there; raises FileNotFoundError naming the first one that is not."""
    names = list(ablation.variants) if prompts == "judge" else _confirmed(ablation)
    keys = [CHAIN.key, *(tree_acceptor(budget).key for budget in sorted(ablation.budgets))]
    found = {
        name: [
            read_judgement(AblationRun(ablation, name, seed), prompts) for seed in ablation.seeds
        ]
        for name in names
    }
    return [
        _row(name, key, fitted, found[name], found[ablation.baseline])
        for fitted in (False, True)
        for name in names
        for key in keys
    ]


def _confirmed(ablation: Ablation) -> list[str]:
    return list(dict.fromkeys([ablation.baseline, *ablation.confirm]))


def _row(
    name: str, key: str, fitted: bool, own: Sequence[Judgement], base: Sequence[Judgement]
) -> AblationRow:
    ours, others = (
        _means(judgements, key, fitted) for judgements in (own, base)
    )  # (prompts, seeds)
    pairs = np.stack([others.mean(1), ours.mean(1)], 1)  # (prompts, 2)
    by_seed = ours.mean(0) / others.mean(0) - 1
    totals = np.concatenate([_totals(judgements, key, fitted) for judgements in (base, own)], 1)
    return AblationRow(
        variant=name,
        acceptor=key,
        fitted=fitted,
        num_prompts=len(pairs),
        num_seeds=len(own),
        acceptance=float(pairs[:, 1].mean()),
        relative=float(pairs[:, 1].mean() / pairs[:, 0].mean() - 1),
        relative_ci95=interval(pairs, lambda means: means[:, 1] / means[:, 0] - 1),
        relative_by_seed=tuple(by_seed.tolist()),
        micro=float(totals[:, 2].sum() / totals[:, 3].sum()),
        micro_relative=float(_micro_change(totals.mean(0)[None])[0]),
        micro_relative_ci95=interval(totals, _micro_change),
    )


def _micro_change(means: np.ndarray) -> np.ndarray:
    """(D,) of (D, 4): emitted tokens and passes of the baseline, then of the variant."""
    return (means[:, 2] / means[:, 3]) / (means[:, 0] / means[:, 1]) - 1


def _totals(judgements: Sequence[Judgement], key: str, fitted: bool) -> np.ndarray:
    """(prompts, 2) emitted tokens and passes, all seeds together; of the same prompts as `_means`."""
    seeds = [judgement.passes(key, fitted) for judgement in judgements]
    found: dict[str, np.ndarray] = {}
    for prompt in (prompt for passes in seeds for prompt in passes if prompt.passes):
        counts = np.array([sum(prompt.passes), len(prompt.passes)], dtype=float)
        found[prompt.prompt_id] = found.get(prompt.prompt_id, 0) + counts
    return np.array([found[prompt] for prompt in sorted(found)])


def _means(judgements: Sequence[Judgement], key: str, fitted: bool) -> np.ndarray:
    """(prompts, seeds) acceptance lengths; the same prompts in the same order whoever was judged."""
    return means_by_seed([judgement.passes(key, fitted) for judgement in judgements])


def means_by_seed(seeds: Sequence[Sequence[PromptPasses]]) -> np.ndarray:
    """(prompts, seeds) acceptance lengths of the passes of each seed; of prompts that have any."""
    columns = [prompt_means(passes) for passes in seeds]
    prompts = sorted(columns[0])
    assert all(sorted(column) == prompts for column in columns), "runs judged on other prompts"
    return np.array([[column[prompt] for column in columns] for prompt in prompts])


def markdown(ablation: Ablation, rows: Sequence[AblationRow]) -> str:
    """Two tables, before and after the fit: acceptance lengths, and the change at the headline budget with its interval."""
    first = rows[0]
    text = [
        f"{first.num_prompts} held-out prompts, {first.num_seeds} seeds, {ablation.warmup_steps} steps of decayed "
        f"cross-entropy, then {ablation.steps} steps of each variant that names no others; tokens a verify pass, macro mean over prompts.",
        f"Change: over `{ablation.baseline}` at budget {ablation.headline_budget}, 95 % interval paired by prompt; "
        "then each seed's; then the same of the micro mean (all tokens over all passes), which throughput follows.",
    ]
    for fitted, title in ((False, "As trained"), (True, "After the temperature fit")):
        part = [row for row in rows if row.fitted == fitted]
        text += ["", f"**{title}**", "", *_table(ablation, part)]
    return "\n".join(text) + "\n"


def _table(ablation: Ablation, rows: Sequence[AblationRow]) -> list[str]:
    keys = list(dict.fromkeys(row.acceptor for row in rows))
    cells = {(row.variant, row.acceptor): row for row in rows}
    head = ["loss", *keys, "change", "95 %", "by seed", "micro", "change", "95 %"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    headline = tree_acceptor(ablation.headline_budget).key
    for name in dict.fromkeys(row.variant for row in rows):
        row = cells[name, headline]
        seeds = ", ".join(f"{100 * value:+.1f}" for value in row.relative_by_seed)
        values = [f"{cells[name, key].acceptance:.3f}" for key in keys]
        macro = [*change_cells(row.relative, row.relative_ci95), seeds]
        micro = [f"{row.micro:.3f}", *change_cells(row.micro_relative, row.micro_relative_ci95)]
        lines.append("| " + " | ".join([f"`{name}`", *values, *macro, *micro]) + " |")
    return lines


def change_cells(relative: float, ci95: tuple[float, float] | None) -> list[str]:
    """A change and its interval, in percent."""
    low, high = ci95 or (float("nan"), float("nan"))
    return [f"{100 * relative:+.1f} %", f"{100 * low:+.1f} to {100 * high:+.1f}"]


def training_curves(ablation: Ablation) -> dict[str, list[dict[str, float]]]:
    """By run, the lines of its training log."""
    curves = {}
    for name in ablation.variants:
        for seed in ablation.seeds:
            run = AblationRun(ablation, name, seed)
            lines = (run.folder / "logs" / "train.jsonl").read_text(encoding="utf-8").splitlines()
            curves[run.folder.name] = [json.loads(line) for line in lines]
    return curves


def to_json(rows: Sequence[AblationRow]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
