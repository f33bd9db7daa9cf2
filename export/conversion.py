"""A drafter folder of either format made into one of either format: the same tensors, the same meaning, another config.json.

What cannot be carried over is listed; what would change the drafter is refused. The result is read back and compared with
the source before it appears.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError

from common.files import atomic_path
from drafter.config import DrafterConfig
from drafter.decoder_json import DTYPE_NAMES
from drafter.folder import CONFIG_FILE, Format, FoundDrafter, find_drafter_folder, notes_of
from drafter.own_head import require_targets_own
from drafter.weights import INDEX_FILE, Weights, checked_reader, expected_shapes, find_weights
from export.folder import TOKENIZER_FILES, Output, write_folder
from export.target_files import own_head, read_target_facts, verifier_of

COPIED = (*TOKENIZER_FILES, "LICENSE", "LICENSE.txt", "NOTICE")


@dataclass(frozen=True)
class Converted:
    folder: Path
    config: DrafterConfig
    notes: list[str]
    """Everything of the source that is not in the result, a line each."""


@dataclass(frozen=True)
class TargetName:
    """The drafter's target as the user gave it, and where its files are."""

    name: str
    folder: Path


def convert_folder(
    source: Path,
    out: Path,
    to: Format,
    target: TargetName | None = None,
    dtype: torch.dtype | None = None,
    self_contained: bool = False,
) -> Converted:
    """Write `source` as the folder `out` in the format `to`; `dtype` None keeps the stored one, and every byte of the tensors.

    Raises ValueError or FileNotFoundError in one line; `out` is then as it was.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; give a folder that does not")
    found = find_drafter_folder(source)
    weights = find_weights(source, found.config)
    read = checked_reader(weights, found.config, found.values)
    stored = weights.read("fc.weight").dtype
    config = _complete(found, target)
    if self_contained and target is None:
        raise ValueError("a self-contained folder holds the target's embedding and head: --target")
    head = None
    if target is not None:
        files = target.folder
        require_targets_own(source, lambda: own_head(files))
        head = own_head(files) if self_contained else None
    verifier = found.verifier if target is None else verifier_of(target.name, target.folder)
    output = Output(to, verifier, head)
    with atomic_path(out) as aside:
        write_folder(aside, config, read, dtype or stored, output)
        notes = [*notes_of(found, weights), *_copy_others(source, aside, weights)]
        _require_same(aside, config, weights, dtype or stored)
    return Converted(out, config, notes)


def find_target(name: str, with_weights: bool) -> TargetName:
    """A local folder, or a hub id whose config.json (and tensors, if they are needed) are fetched or in the hub's cache."""
    if Path(name).is_dir():
        return TargetName(name, Path(name))
    files = [
        "config.json",
        *(["*.safetensors", "*.safetensors.index.json"] if with_weights else []),
    ]
    try:
        return TargetName(name, Path(huggingface_hub.snapshot_download(name, allow_patterns=files)))
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"--target {name} is no folder here and could not be fetched from the hub ({type(error).__name__}); check the "
            "name, the network and HF_HUB_OFFLINE"
        ) from error


def _complete(found: FoundDrafter, target: TargetName | None) -> DrafterConfig:
    """The config with the target's depth, checked against the target."""
    if target is None:
        return found.config
    facts = read_target_facts(target.folder)
    for key, wanted in (
        ("hidden_size", facts.hidden_size),
        ("vocab_size", facts.vocab_size),
        ("num_target_layers", facts.num_layers),
    ):
        value = asdict(found.config)[key]
        if value not in (None, wanted):
            name = key.replace("num_target_layers", "num_hidden_layers")
            raise ValueError(
                f"{found.path} was made for a target with {name}={value}, {target.name} has {wanted}; name its own target"
            )
    return replace(found.config, num_target_layers=facts.num_layers)


def _copy_others(source: Path, folder: Path, weights: Weights) -> list[str]:
    """Copy what is neither config nor weights and is known; list the rest."""
    done = {CONFIG_FILE, INDEX_FILE, *(file.name for file in weights.files)}
    notes = []
    for path in sorted(source.iterdir()):
        if path.name in COPIED and path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif path.name not in done:
            notes.append(f"{path.name} was not copied")
    return notes


def _require_same(folder: Path, config: DrafterConfig, source: Weights, dtype: torch.dtype) -> None:
    """Read the result back. Raises ValueError if it is not the source in `dtype`."""
    back = find_drafter_folder(folder)
    if back.config != config:
        raise ValueError(f"{folder} reads back as {back.config}, not as {config}; report this")
    weights = find_weights(folder, back.config)
    read = checked_reader(weights, back.config, back.values)
    for name in expected_shapes(config):
        if not torch.equal(read(name), source.read(name).to(dtype)):
            raise ValueError(f"{folder}: {name} reads back otherwise than it was; report this")


def dtype_named(name: str | None) -> torch.dtype | None:
    """One of DTYPE_NAMES; None for None."""
    return {text: dtype for dtype, text in DTYPE_NAMES.items()}[name] if name else None
