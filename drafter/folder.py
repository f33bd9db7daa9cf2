"""A drafter on disk, in z-lab's format or speculators': a config.json and safetensors. Strict both ways.

Servers ignore tensors they do not know and default keys they miss; here both are refused, in one line each, or listed as a
note when nothing of the drafter depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common.files import fields_of, read_json, sha256_file, write_json
from common.fingerprint import fingerprint
from drafter.config import DrafterConfig
from drafter.config_json import config_json, parse_config_json
from drafter.json_values import Values
from drafter.model import Drafter
from drafter.speculators_json import Verifier, parse_speculators_json
from drafter.weights import (
    REMEDY,
    WEIGHTS_FILE,
    Weights,
    checked_reader,
    expected_shapes,
    find_weights,
    weights_sums,
    write_weights,
)

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "expected_shapes"]

CONFIG_FILE = "config.json"
LARGEST_CONFIG_BYTES = 1_000_000
Format = Literal["zlab", "speculators"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundDrafter:
    """What a folder's config.json says, before any weight is read."""

    path: Path
    format: Format
    config: DrafterConfig
    verifier: Verifier | None
    """The target that a speculators folder names."""
    notes: tuple[str, ...]
    """What was left out or is worth knowing, a line each."""
    values: Values
    """config.json as it is."""


def write_drafter(
    path: Path,
    config: DrafterConfig,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    without: Collection[str] = (),
) -> None:
    """Write a folder in z-lab's format, each of its two files whole or absent; equal input gives equal bytes.

    state: the parameters of `Drafter(config)` by name, stored as `dtype`, but for those named in `without`: a checkpoint's
    frozen part (drafter/frozen.py).
    """
    names = expected_shapes(config).keys() - set(without)
    assert state.keys() == names, "the state is not this drafter's"
    write_weights(path, config, state.__getitem__, dtype, without=without)
    write_json(path / CONFIG_FILE, config_json(config, dtype))


def find_drafter_folder(path: Path) -> FoundDrafter:
    """Read a drafter folder's config.json. Raises ValueError or FileNotFoundError in one line naming file and key."""
    values = _read_config(path)
    try:
        if isinstance(values, dict) and "speculators_model_type" in values:
            described, verifier = parse_speculators_json(values)
            return FoundDrafter(
                path, "speculators", described.config, verifier, described.notes, values
            )
        described = parse_config_json(values)
        return FoundDrafter(path, "zlab", described.config, None, described.notes, values)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG_FILE}: {error}") from error


def read_drafter_config(path: Path) -> DrafterConfig:
    """The config of a drafter folder of either format. Raises as `find_drafter_folder` does."""
    return find_drafter_folder(path).config


def load_drafter(path: Path, device: torch.device | str, dtype: torch.dtype) -> Drafter:
    """The drafter of a folder of either format, its tensors converted to `dtype` one by one; logs the folder's notes.

    Raises as `find_drafter_folder` does. Copies of the target's embedding or head are not read: see
    `drafter.own_head.require_targets_own`.
    """
    found = find_drafter_folder(path)
    weights = find_weights(path, found.config)
    for note in notes_of(found, weights):
        logger.warning("%s: %s", path, note)
    read = checked_reader(weights, found.config, found.values)
    state = {name: read(name).to(device, dtype) for name in expected_shapes(found.config)}
    with torch.device("meta"):
        drafter = Drafter(found.config)
    drafter.load_state_dict(state, assign=True)
    return drafter.requires_grad_()


def check_drafter(path: Path) -> list[str]:
    """Check every tensor of a folder without keeping any; returns its notes. Raises as `load_drafter` does."""
    found = find_drafter_folder(path)
    weights = find_weights(path, found.config)
    read = checked_reader(weights, found.config, found.values)
    for name in expected_shapes(found.config):
        read(name)
    return notes_of(found, weights)


def notes_of(found: FoundDrafter, weights: Weights) -> list[str]:
    """Everything of a folder that is not taken over, from its config and its tensors, a line each."""
    notes = list(found.notes)
    if weights.others:
        notes.append(
            f"{', '.join(weights.others)}: not read; vLLM and SGLang may load every weights file of a folder"
        )
    if weights.targets:
        notes.append(
            f"{', '.join(weights.targets)}: copies of the target's own, not read; the run's target is used"
        )
    return notes


def drafter_fingerprint(path: Path) -> str:
    """Of the configuration and the weights' bytes of a drafter folder."""
    return fingerprint([asdict(read_drafter_config(path)), *weights_sums(path)])


def resolve_checkpoint(checkpoints_dir: Path, which: Literal["best", "last"]) -> Path:
    """The folder that `index.json` lists as `best` or `last`, its two drafter files checked against their sums.

    A folder that is there but not listed was never finished. Raises ValueError or FileNotFoundError in one line.
    """
    path = checkpoints_dir / "index.json"
    remedy = "train first: ./launch.sh train CONFIG"
    index = read_json(path, remedy)
    with fields_of(path, remedy):
        name = index[which]
        sums = {entry["folder"]: entry["sha256"] for entry in index["checkpoints"]}
    if name is None:
        raise ValueError(
            f"{checkpoints_dir} has no {which!r} checkpoint yet; train until an evaluation "
            "(train.eval_every; it needs data.validation_fraction), or choose one: export.checkpoint=last, evaluate --drafter FOLDER"
        )
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        with fields_of(path, remedy):
            wanted = sums[name][file]
        _require_sum(checkpoints_dir / name / file, wanted)
    return checkpoints_dir / name


def _require_sum(file: Path, wanted: str) -> None:
    remedy = "delete this checkpoint and resume training, or choose export.checkpoint otherwise"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is listed in index.json but missing; {remedy}")
    if sha256_file(file) != wanted:
        raise ValueError(f"{file} differs from its sha256 in index.json; {remedy}")


def _read_config(path: Path) -> Any:
    """Raises ValueError also for a config.json that is too big or too deep to be one."""
    if not path.is_dir():
        raise FileNotFoundError(f"drafter folder {path} does not exist; {REMEDY}")
    file = path / CONFIG_FILE
    if file.is_file() and file.stat().st_size > LARGEST_CONFIG_BYTES:
        raise ValueError(f"{file} is larger than {LARGEST_CONFIG_BYTES:,} bytes; {REMEDY}")
    try:
        return read_json(file, REMEDY)
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deep; {REMEDY}") from error
