"""Make the target's local folder when the recipe says how: a tiny random model, a small trained hybrid, or a GGUF of a wheel."""

from __future__ import annotations

import logging
from pathlib import Path

from common.files import atomic_path, remove_leftovers
from configs.schema import Config, HybridTarget, TinyTarget
from target.hybrid import write_hybrid_target
from target.python_text import read_passages
from target.tiny import write_tiny_target
from target.wheel import write_wheel_target

logger = logging.getLogger(__name__)


def prepare_target(config: Config) -> None:
    """Make `target.model` if `target.prepare` is set and the folder is absent; a folder that exists is complete.

    The folder holds safetensors weights, tokenizer with chat template, and generation_config with the EOS ids. Main rank only.
    """
    section = config.target
    folder = Path(section.model)
    if section.prepare is None or folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent)
    logger.info("making the target %s (once)", folder)
    with atomic_path(folder) as aside:
        aside.mkdir()
        if isinstance(section.prepare, TinyTarget):
            write_tiny_target(aside, section, section.prepare)
        elif isinstance(section.prepare, HybridTarget):
            work = folder.parent / "training"
            write_hybrid_target(aside, section, section.prepare, read_passages(), work)
        else:
            write_wheel_target(aside, section.prepare, downloads=folder.parent / "downloads")
        for file in aside.iterdir():
            file.chmod(0o644)  # safetensors makes it 0600; a server may run as another user
