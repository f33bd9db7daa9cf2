"""The export stage: a checkpoint becomes the folder that other code loads; verified in a new process, then put in place.

export/zlab/          config.json, model.safetensors (bf16), the target's tokenizer files, README.md (model card)
export/speculators/   the same in speculators' format
export/FORMAT-self-contained/   with the target's embedding and head besides
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.files import atomic_path, fields_of, only_writer, read_json, remove_leftovers
from common.fingerprint import require_equal
from configs.schema import Config
from data.features import FeatureSet, open_features
from drafter.config import drafter_config
from drafter.folder import (
    Format,
    drafter_fingerprint,
    find_drafter_folder,
    read_drafter_config,
    resolve_checkpoint,
)
from drafter.weights import checked_reader, find_weights
from export.card import CardFacts, model_card
from export.card_results import acceptance, headline
from export.folder import Output, copy_tokenizer, write_folder
from export.serve import ServeCommands, serve_commands
from export.target_files import verifier_of
from export.verify import Verification, VerifyJob, verify_in_new_process
from target.head import load_target_head
from target.identity import target_identity
from target.load import target_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    folder: Path
    checkpoint: Path
    verification: Verification
    commands: ServeCommands


def export_drafter(
    config: Config,
    drafter_format: Format = "zlab",
    self_contained: bool = False,
    published_as: str | None = None,
) -> Exported:
    """Export the checkpoint that `export.checkpoint` names. The folder appears, or is replaced, only once verified.

    published_as: hub id under which the card's commands find the drafter; None: the folder itself.
    Needs neither a GPU nor the ranks that trained; about one copy of the drafter is alive at a time. Raises ValueError or
    FileNotFoundError if checkpoint, features, target and recipe disagree, the verification fails, or another export works here.
    """
    run, target = config.run.folder, target_folder(config.target)
    checkpoint = resolve_checkpoint(run / "checkpoints", config.export.checkpoint)
    features = open_features(config.features_location)
    check_settings(config, checkpoint, features)
    name = config.export.base_model or config.target.model
    output = Output(
        drafter_format,
        verifier_of(name, target),
        load_target_head(features.checked_head(), "cpu", None) if self_contained else None,
    )
    folder = run / "export" / output.folder_name
    commands = serve_commands(
        name, published_as or str(folder), drafter_config(config), drafter_format
    )
    with only_writer(run / ".export.lock"):
        remove_leftovers(folder.parent)
        with atomic_path(folder) as aside:
            write_checkpoint(checkpoint, aside, output)
            copy_tokenizer(target, aside)
            logger.info("verifying %s against %s in a new process", folder, checkpoint)
            job = VerifyJob(
                aside,
                checkpoint,
                features.location,
                target,
                config.export.verify_rows,
                config.run.cpu_threads,
            )
            verification = verify_in_new_process(job)
            facts = card_facts(config, checkpoint, features, output)
            (aside / "README.md").write_text(
                model_card(facts, verification, commands), encoding="utf-8"
            )
    return Exported(folder, checkpoint, verification, commands)


def write_checkpoint(checkpoint: Path, folder: Path, output: Output) -> None:
    """A float32 checkpoint as a bf16 folder, tensor by tensor."""
    found = find_drafter_folder(checkpoint)
    weights = find_weights(checkpoint, found.config)
    read = checked_reader(weights, found.config, found.values)
    write_folder(folder, found.config, read, torch.bfloat16, output)


def check_settings(config: Config, checkpoint: Path, features: FeatureSet) -> None:
    """Raises ValueError naming the first setting, and both values, in which two of the three disagree."""
    remedy = "set the recipe back, or train again with this one"
    found = asdict(read_drafter_config(checkpoint))
    require_equal(f"the checkpoint {checkpoint}", found, asdict(drafter_config(config)), remedy)
    wanted = target_identity(config.target) | {
        "target_layer_ids": list(config.drafter.target_layer_ids),
        "hidden_size": config.target.hidden_size,
        "num_layers": config.target.num_layers,
        "vocab_size": config.target.vocab_size,
    }
    require_equal(f"the features in {features.location}", features.settings, wanted, remedy)


def card_facts(config: Config, checkpoint: Path, features: FeatureSet, output: Output) -> CardFacts:
    report_file = config.run.folder / "evaluation" / "report.json"
    report: dict[str, Any] | None = None
    if report_file.is_file():
        report = read_report(report_file)
    return CardFacts(
        config=config,
        drafter=drafter_config(config),
        format=output.format,
        self_contained=output.target_head is not None,
        checkpoint=checkpoint.name,
        fingerprint=drafter_fingerprint(checkpoint),
        entries=features.entries,
        report=report,
    )


def read_report(path: Path) -> dict[str, Any]:
    """Raises ValueError if the card cannot take its numbers from it."""
    remedy = "run ./launch.sh evaluate again, or delete it"
    report = read_json(path, remedy)
    with fields_of(path, remedy):
        _ = report["drafter"], headline(report), acceptance(report)
    return report
