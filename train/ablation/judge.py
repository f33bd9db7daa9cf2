"""What a trained run is worth: its held-out prompts replayed, before and after its own temperature fit on other prompts.

Held-out rows (validation and test) are divided by a hash of their id into three sets: `fit` for the temperatures, `judge` for the
table, `confirm` for the one look at the end. No row is in two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from common.distributed import Ranks
from common.files import fields_of, read_json, write_json
from common.fingerprint import fingerprint
from common.progress import Progress
from data.features import FeatureSet, RowEntry, open_features
from drafter.folder import drafter_fingerprint, load_drafter, resolve_checkpoint
from evaluation.acceptance import PromptPasses
from evaluation.calibration import FIT_RULE, fit_temperatures
from evaluation.replay import ReplayOptions, replay_row
from target.head import load_target_head
from train.ablation.runs import AblationRun, base_config
from train.ablation.settings import Ablation
from train.checkpoint import Checkpoints
from train.engine import DTYPES
from train.resume import run_settings, same_run

PromptSet = Literal["judge", "confirm"]
REMEDY = "delete it; the ablation judges the run again"


@dataclass(frozen=True)
class PromptSets:
    fit: list[RowEntry]
    judge: list[RowEntry]
    confirm: list[RowEntry]


@dataclass(frozen=True)
class Judgement:
    """A run on one set of prompts. Passes by prompt id, then by acceptor key: emitted tokens a verify pass."""

    identity: str
    """Of drafter, prompts and settings: a judgement with another one is made again."""
    temperatures: tuple[float, ...]
    """A value a slot, fitted on the `fit` rows."""
    tasks: dict[str, str]
    raw: dict[str, dict[str, list[int]]]
    fitted: dict[str, dict[str, list[int]]]

    def passes(self, key: str, is_fitted: bool) -> list[PromptPasses]:
        """Of one acceptor, a prompt each."""
        found = self.fitted if is_fitted else self.raw
        return [
            PromptPasses(prompt, self.tasks[prompt], tuple(by_key[key]))
            for prompt, by_key in found.items()
        ]


def divide_prompts(features: FeatureSet, ablation: Ablation) -> PromptSets:
    """Raises ValueError if a set is empty."""
    sets = PromptSets([], [], [])
    for entry in features.of_split("validation") + features.of_split("test"):
        digest = hashlib.sha256(f"ablation {entry.sample_id}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        if place < ablation.fit_fraction:
            sets.fit.append(entry)
        elif place < ablation.fit_fraction + ablation.confirm_fraction:
            sets.confirm.append(entry)
        else:
            sets.judge.append(entry)
    for name in ("fit", "judge"):
        if not vars(sets)[name]:
            raise ValueError(
                f"no held-out row falls into the {name} set; the features in {features.location} need more rows of the "
                "validation and test splits (data.validation_fraction, data.test_fraction)"
            )
    limit = ablation.max_prompts
    return PromptSets(sets.fit, sets.judge[:limit], sets.confirm[:limit])


def judgement_path(run: AblationRun, prompts: PromptSet) -> Path:
    return run.folder / f"{prompts}.json"


def read_judgement(run: AblationRun, prompts: PromptSet) -> Judgement:
    path = judgement_path(run, prompts)
    value = read_json(path, REMEDY)
    with fields_of(path, REMEDY):
        return Judgement(**value | {"temperatures": tuple(value["temperatures"])})


def judge_run(run: AblationRun, prompts: PromptSet, ranks: Ranks) -> None:
    """Write the judgement of a finished run, if there is none yet of the same drafter, prompts and settings."""
    config, ablation = run.config(), run.ablation
    features = open_features(run.config().features_location)
    sets = divide_prompts(features, ablation)
    if is_judged(run, prompts, sets):
        return
    folder = resolve_checkpoint(run.folder / "checkpoints", "last")
    wanted = _identity(run, sets, prompts, drafter_fingerprint(folder))
    path = judgement_path(run, prompts)
    dtype = DTYPES[config.evaluation.dtype]
    drafter = load_drafter(folder, ranks.device, dtype).eval().requires_grad_(False)
    head = load_target_head(features.checked_head(), ranks.device, dtype)
    fit = fit_temperatures(
        drafter,
        head,
        (features.read(entry) for entry in sets.fit),
        ablation.fit_anchors_per_row,
        max(ablation.budgets),
    )
    options = ReplayOptions(
        tuple(sorted(ablation.budgets)),
        fit.temperatures,
        config.evaluation.max_new_tokens,
        compares_unfitted=True,
    )
    entries: Sequence[RowEntry] = vars(sets)[prompts]
    progress = Progress(f"replay {run.folder.name}", len(entries), "prompts")
    tasks: dict[str, str] = {}
    raw: dict[str, dict[str, list[int]]] = {}
    fitted: dict[str, dict[str, list[int]]] = {}
    for entry in entries:
        row = features.read(entry)
        tasks[row.sample_id] = row.task
        replayed = replay_row(drafter, head, row, options)
        assert replayed.unfitted_passes is not None
        raw[row.sample_id], fitted[row.sample_id] = replayed.unfitted_passes, replayed.passes
        progress.advance()
    progress.finish()
    write_json(path, asdict(Judgement(wanted, fit.temperatures, tasks, raw, fitted)))


def is_judged(run: AblationRun, prompts: PromptSet, sets: PromptSets) -> bool:
    """Whether the run is trained and its judgement is of this drafter, these rows and settings."""
    if not is_trained(run) or not judgement_path(run, prompts).is_file():
        return False
    folder = resolve_checkpoint(run.folder / "checkpoints", "last")
    wanted = _identity(run, sets, prompts, drafter_fingerprint(folder))
    return read_judgement(run, prompts).identity == wanted


def is_trained(run: AblationRun) -> bool:
    """Whether the last step's checkpoint is listed, of these settings and features; other ones are the trainer's to refuse."""
    checkpoints = Checkpoints(run.folder / "checkpoints", 1)
    entries = checkpoints.entries()
    if not entries or entries[-1].step != run.num_steps:
        return False
    _, found = checkpoints.read_state(entries[-1])
    features = base_config(run.ablation).features_location
    return same_run(found, run_settings(run.config(), features))


def _identity(run: AblationRun, sets: PromptSets, prompts: PromptSet, drafter: str) -> str:
    rows = {name: [entry.sample_id for entry in vars(sets)[name]] for name in ("fit", prompts)}
    # how the drafter came to be is not in it: its weights are
    evaluation = run.config().evaluation
    return fingerprint(
        [
            drafter,
            rows,
            sorted(run.ablation.budgets),
            [FIT_RULE, run.ablation.fit_anchors_per_row],
            [evaluation.max_new_tokens, evaluation.dtype],
            torch.__version__,
        ]
    )
