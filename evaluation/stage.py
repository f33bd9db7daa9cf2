"""The evaluate stage: replay of the test rows, live decoding of some of them, and the report.

Ranks share the prompts; every finished prompt is a record on disk (evaluation/records.py). The main rank reads all
records and writes report.json and report.html. Ranks and restarts do not change the acceptance lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.distributed import Ranks, raise_together
from common.files import remove_leftovers, sha256_file, write_json
from common.fingerprint import fingerprint
from configs.schema import Config, EvaluationSection
from data.features import FeatureSet, RowEntry
from drafter.model import Drafter
from evaluation.acceptors import CHAIN_REJECTION
from evaluation.costs import MeasuredCost, read_costs
from evaluation.inputs import DrafterSource, open_test_features
from evaluation.live import choose_prompts, decode_prompts, prompt_of
from evaluation.loading import LiveTarget
from evaluation.page import write_page
from evaluation.prompt_records import write_prompt_records
from evaluation.records import (
    RECORD_FORMAT,
    RecordKind,
    live_from_json,
    live_to_json,
    make_missing,
    read_all,
    replay_from_json,
    replay_to_json,
)
from evaluation.replay import ReplayOptions, empty_sums, replay_row
from evaluation.report import Identity, Measured, Settled, build_report
from evaluation.tuning import Tuning, TuningFiles, fit_on_validation, settle
from target.head import load_target_head
from target.identity import target_identity
from target.load import eos_token_ids, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What is evaluated, and where its records and reports go."""

    config: Config
    ranks: Ranks
    features: FeatureSet
    source: DrafterSource
    identity: Identity

    @property
    def folder(self) -> Path:
        return self.config.run.folder / "evaluation"

    def records(self, kind: str) -> RecordKind:
        identity = self.identity
        key = fingerprint([RECORD_FORMAT, identity.target, identity.drafter, identity.config])
        return RecordKind(kind, self.folder / "records" / key[:16])

    @property
    def tuning(self) -> TuningFiles:
        return TuningFiles(self.records("live").folder, self.config.evaluation)

    @property
    def options(self) -> ReplayOptions:
        """Of the replay; what was settled before it is read from its files."""
        section, tuning = self.config.evaluation, self.tuning.read()
        return ReplayOptions(
            tuple(sorted(set(section.budgets))),
            tuning.drafter_temperature,
            section.max_new_tokens,
            names=section.acceptors,
            cost=tuning.cost,
            compares_unfitted=self.tuning.needs_fit,
        )

    @property
    def drafter_device(self) -> torch.device:
        """The rank's, or the one the recipe sets aside for the drafter."""
        given = self.config.evaluation.drafter_device
        return self.ranks.device if given is None else torch.device(given)

    @property
    def group_size(self) -> int:
        """Live prompts decoded between two saves: enough to keep the rows of a batch busy."""
        batch = self.config.evaluation.live_batch_size
        return batch if batch == 1 else 4 * batch

    @property
    def replay_entries(self) -> list[RowEntry]:
        """None where no acceptor can be replayed."""
        if set(self.config.evaluation.acceptors) == {CHAIN_REJECTION.name}:
            return []
        return self.features.of_split("test")[: self.config.evaluation.replay_prompts]

    @property
    def live_entries(self) -> list[RowEntry]:
        entries = self.features.of_split("test")
        return choose_prompts(entries, self.config.evaluation.live_prompts, self.config.run.seed)


def plan_work(config: Config, ranks: Ranks, source: DrafterSource) -> Work:
    """Open the features and identify everything. Raises before any model loads if something does not fit."""
    features = open_test_features(config)
    source.require_target(features)
    # the number of prompts is no part of a record: asking for more of them keeps those that are there
    section = config.evaluation.model_copy(update={"live_prompts": 0, "replay_prompts": 0})
    ends = eos_token_ids(config.target, load_tokenizer(config.target))
    settings = [section.model_dump(mode="json"), features.settings, config.run.seed, ends]
    if section.cost_file is not None:
        _require_same_batch(section, read_costs(section.cost_file))  # raises, naming the file
        settings.append(sha256_file(section.cost_file))
    identity = Identity(
        target=fingerprint(target_identity(config.target)),
        drafter=source.fingerprint(),
        config=fingerprint(settings),
        settings=_settings(config, features),
        facts=_facts(config, source, features),
    )
    return Work(config, ranks, features, source, identity)


def _require_same_batch(section: EvaluationSection, cost: MeasuredCost) -> None:
    """Raises ValueError if costs of another number of rows would size the trees and model the speeds."""
    if cost.num_sequences != section.live_batch_size:
        raise ValueError(
            f"evaluation.cost_file={section.cost_file} has the costs of {cost.num_sequences} prompts decoded together, and "
            f"evaluation.live_batch_size={section.live_batch_size}; give a file measured with as many, or set one as the other"
        )


def run_evaluation(work: Work) -> dict[str, Any] | None:
    """Make the missing records, then the report: returned on the main rank, None on the others. Collective."""
    device, dtype = work.drafter_device, getattr(torch, work.config.evaluation.dtype)
    with raise_together(work.ranks):
        if work.ranks.is_main:
            remove_leftovers(work.records("replay").folder)
    with raise_together(work.ranks):
        live = LiveTarget(
            work.config,
            work.ranks,
            work.source.load(device, dtype),
            work.config.evaluation.dtype,
        )
    settle_tuning(work, live)
    with raise_together(work.ranks):
        _replay(work, live.drafter, dtype)
    with raise_together(work.ranks):
        _decode_live(work, live)
    report = None
    with raise_together(work.ranks):
        if work.ranks.is_main:
            report = write_report(work)
    return report


def settle_tuning(work: Work, live: LiveTarget) -> None:
    """The main rank fits temperatures and measures costs if the recipe asks for them and they are not there. Collective."""
    section, device = work.config.evaluation, work.drafter_device

    def fit() -> dict[str, Any]:
        dtype = live.drafter.fc.weight.dtype
        head = load_target_head(work.features.checked_head(), device, dtype)
        return fit_on_validation(
            live.drafter, head, work.features, section.fit_anchors, max(section.budgets)
        )

    def measure(tuning: Tuning) -> MeasuredCost:
        first = work.features.of_split("test")[0]
        return live.measure(tuning, prompt_of(work.features.read(first)))

    with raise_together(work.ranks):
        if work.ranks.is_main:
            settle(work.tuning, fit, measure)


def _replay(work: Work, drafter: Drafter, dtype: torch.dtype) -> None:
    head = load_target_head(work.features.checked_head(), work.drafter_device, dtype)
    options = work.options

    def make(group: Sequence[RowEntry]) -> list[dict[str, Any]]:
        rows = [work.features.read(entry) for entry in group]
        return [replay_to_json(replay_row(drafter, head, row, options)) for row in rows]

    make_missing(work.records("replay"), work.replay_entries, work.ranks, make)


def _decode_live(work: Work, live: LiveTarget) -> None:
    """The target loads only if a record is missing."""
    kind, entries = work.records("live"), work.live_entries
    if all(kind.path(entry).is_file() for entry in entries):
        return
    setup = live.setup(work.tuning.read())

    def make(group: Sequence[RowEntry]) -> list[dict[str, Any]]:
        prompts = [prompt_of(work.features.read(entry)) for entry in group]
        return [live_to_json(record) for record in decode_prompts(setup, prompts)]

    make_missing(kind, entries, work.ranks, make, work.group_size)


def write_report(work: Work) -> dict[str, Any]:
    """report.json and report.html from the records on disk. Raises FileNotFoundError if one is missing."""
    replayed = list(read_all(work.records("replay"), work.replay_entries, replay_from_json))
    live = list(read_all(work.records("live"), work.live_entries, live_from_json))
    options = work.options
    sums = empty_sums(work.source.config, options)
    for row in replayed:
        sums += row.sums
    cost = work.tuning.read_costs() if work.tuning.needs_costs else None
    measured = Measured(
        options,
        replayed,
        live,
        sums,
        _record_temperature(work.config),
        cost and cost.round_seconds(),
        Settled(work.tuning.read_fit(), cost and cost.to_json()),
    )
    records = measured.prompt_records()
    report = build_report(work.identity, measured, records)
    report["prompts"] = write_prompt_records(work.folder, records)
    write_json(work.folder / "report.json", report)
    trees = [tree for record in live for tree in record.trees]
    write_page(work.folder / "report.html", report, trees, work.config.run.folder / "logs")
    return report


def _record_temperature(config: Config) -> float | None:
    responses = config.data.responses
    return responses.temperature if responses.generate else None


def _settings(config: Config, features: FeatureSet) -> dict[str, Any]:
    """What two evaluations must share for their acceptance lengths to be compared; the drafter may differ in all it is."""
    target = target_identity(config.target)
    section = config.evaluation
    return {
        **{f"target {key}": target[key] for key in ("weights", "tokenizer", "chat_template")},
        "target chat_template_kwargs": target["chat_template_kwargs"],
        "target.dtype": config.target.dtype,
        "extract.codec": features.settings["codec"],
        "evaluation.max_new_tokens": section.max_new_tokens,
        "evaluation.dtype": section.dtype,
        "evaluation.top_p": section.top_p,
        "evaluation.top_k": section.top_k,
        "temperature of the records": _record_temperature(config),
    }


def _facts(config: Config, source: DrafterSource, features: FeatureSet) -> dict[str, str]:
    drafter = source.config
    section = config.evaluation
    return {
        "run": config.run.name,
        "target": config.target.model,
        "drafter": source.name,
        "drafter layers": f"{drafter.num_layers} ({', '.join(drafter.layer_types)})",
        "block size": str(drafter.block_size),
        "taps": ", ".join(map(str, drafter.target_layer_ids)),
        "feature codec": str(features.settings["codec"]),
        "test rows": str(len(features.of_split("test"))),
        "live dtype": section.dtype,
        "drafter temperature": str(section.drafter_temperature),
        "max new tokens": str(section.max_new_tokens),
    }
