"""The export stage: a checkpoint becomes the folder that z-lab's code, vLLM and SGLang load; verified, then put in place.

export/zlab/  config.json, model.safetensors (bf16), the target's tokenizer files, README.md (model card)
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.files import atomic_path, read_json, remove_leftovers
from common.fingerprint import require_equal
from configs.schema import Config
from data.features import FeatureSet, open_features
from drafter.config import drafter_config
from drafter.folder import (
    drafter_fingerprint,
    load_drafter,
    read_drafter_config,
    resolve_checkpoint,
    write_drafter,
)
from export.card import CardFacts, model_card
from export.serve import ServeCommands, serve_commands
from export.verify import Verification, VerifyJob, verify_in_new_process
from target.identity import target_identity
from target.load import target_folder

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True)
class Exported:
    folder: Path
    checkpoint: Path
    verification: Verification
    commands: ServeCommands


def export_drafter(config: Config) -> Exported:
    """Export the checkpoint that `export.checkpoint` names. The folder appears, or is replaced, only once verified.

    Raises ValueError or FileNotFoundError if checkpoint, features and recipe disagree, or the verification fails.
    """
    run = config.run.folder
    folder = run / "export" / "zlab"
    checkpoint = resolve_checkpoint(run / "checkpoints", config.export.checkpoint)
    features = open_features(run / "features")
    check_settings(config, checkpoint, features)
    remove_leftovers(folder.parent)
    commands = serve_commands(config.target.model, str(folder), config.drafter.block_size)
    with atomic_path(folder) as aside:
        master = load_drafter(checkpoint, "cpu", torch.float32)
        write_drafter(aside, master.config, master.state_dict(), torch.bfloat16)
        copy_tokenizer(target_folder(config.target), aside)
        logger.info("verifying %s against %s in a new process", folder, checkpoint)
        job = VerifyJob(
            aside, checkpoint, features.folder, config.export.verify_rows, config.run.cpu_threads
        )
        verification = verify_in_new_process(job)
        card = model_card(card_facts(config, checkpoint, features), verification, commands)
        (aside / "README.md").write_text(card, encoding="utf-8")
    return Exported(folder, checkpoint, verification, commands)


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
    require_equal(f"the features in {features.folder}", features.settings, wanted, remedy)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the target's tokenizer files as they are. Raises FileNotFoundError if it has no tokenizer."""
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not {file.name for file in files} & {"tokenizer.json", "tokenizer.model", "vocab.json"}:
        raise FileNotFoundError(f"{source} has no tokenizer.json; complete the target's folder")
    for file in files:
        shutil.copyfile(file, folder / file.name)


def card_facts(config: Config, checkpoint: Path, features: FeatureSet) -> CardFacts:
    report_file = config.run.folder / "evaluation" / "report.json"
    report: dict[str, Any] | None = None
    if report_file.is_file():
        report = read_json(report_file, "run ./launch.sh evaluate again")
    return CardFacts(
        config=config,
        drafter=drafter_config(config),
        checkpoint=checkpoint.name,
        fingerprint=drafter_fingerprint(checkpoint),
        entries=features.entries,
        report=report,
    )
