"""A W&B run of a stage, or none: online with a key, offline without any network if there is none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class WandbRun(Protocol):
    """What is used of wandb.Run."""

    @property
    def id(self) -> str: ...

    def log(self, data: dict[str, Any], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


def has_key() -> bool:
    return bool(os.environ.get("WANDB_API_KEY"))


def start_run(
    project: str | None,
    name: str,
    folder: Path,
    config: dict[str, Any],
    run_id: str | None = None,
    job_type: str | None = None,
) -> WandbRun | None:
    """A run, continued if `run_id` is given; None without a project or with WANDB_MODE=disabled.

    `folder`: where W&B keeps its files. Runs of one `name` are one group.
    """
    if project is None or os.environ.get("WANDB_MODE") == "disabled":
        return None
    online = has_key() and os.environ.get("WANDB_MODE") != "offline"
    if not online:
        # an offline wandb still reports its own use and errors to its server, unless both say no before it is imported
        os.environ.update(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false")
    import wandb  # slow to import, and not wanted by every run

    mode = "online" if online else "offline"
    logger.info("W&B %s, project %s", mode, project)
    return wandb.init(
        project=project,
        name=name,
        group=name,
        job_type=job_type,
        id=run_id,
        resume="allow" if online else None,
        mode=mode,
        dir=folder,
        config=config,
        settings=wandb.Settings(silent=True, console="off"),
    )
