"""`./launch.sh workspace CONFIG`: a W&B workspace whose panels are the metrics that training logs, grouped by their names.

Needs the optional extra `workspace` (wandb-workspaces) and a key; without them nothing is sent and one line says what to do.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.command import run_command, stage_parser
from configs.load import load_config
from configs.schema import Config
from train.tracking import METRICS

if TYPE_CHECKING:  # an optional extra
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

NAME = "Draft trees"


@dataclass(frozen=True)
class WorkspacePanel:
    """A line plot of the metrics of some patterns of METRICS."""

    section: str
    title: str
    patterns: tuple[str, ...]
    is_log: bool = False
    is_stacked: bool = False
    """Shares of one whole."""


PANELS = (
    WorkspacePanel(
        "Acceptance",
        "Acceptance length, validation rows",
        ("validation/chain_acceptance", "validation/tree_acceptance_*"),
    ),
    WorkspacePanel(
        "Acceptance", "Tokens a pass emits: tree", ("walk/tree_*_emits_*",), is_stacked=True
    ),
    WorkspacePanel(
        "Acceptance", "Tokens a pass emits: chain", ("walk/chain_emits_*",), is_stacked=True
    ),
    WorkspacePanel("Loss", "Training loss", ("train/loss",), is_log=True),
    WorkspacePanel("Loss", "Drafted ahead in blocks", ("train/chain_hits", "train/tree_hits")),
    WorkspacePanel("Loss", "Weights", ("train/mean_weight", "train/loss_share")),
    WorkspacePanel("Survival and recall", "Survival by depth: tree", ("survival/tree_*_depth_*",)),
    WorkspacePanel("Survival and recall", "Survival by depth: chain", ("survival/chain_depth_*",)),
    WorkspacePanel("Survival and recall", "Recall of each slot", ("recall/top_*_slot_*",)),
    WorkspacePanel("Calibration", "Expected calibration error", ("calibration/ece",)),
    WorkspacePanel(
        "Calibration",
        "Expected over real accepted tokens",
        ("calibration/chain_ratio", "calibration/tree_ratio_*"),
    ),
    WorkspacePanel("Calibration", "Right nodes by probability bin", ("calibration/right_bin_*",)),
    WorkspacePanel("Calibration", "Expected probability by bin", ("calibration/expected_bin_*",)),
    WorkspacePanel("Optimizer", "Learning rate", ("train/learning_rate",)),
    WorkspacePanel("Optimizer", "Gradient norm", ("train/grad_norm",), is_log=True),
)
"""What belongs together. A metric that none of them names gets a panel of its own, in the section `Speed and data`."""
REST = "Speed and data"


def all_workspace_panels() -> list[WorkspacePanel]:
    """Every pattern of METRICS once."""
    named = {pattern for panel in PANELS for pattern in panel.patterns}
    rest = [pattern for pattern in METRICS if pattern not in named]
    return [
        *PANELS,
        *(WorkspacePanel(REST, pattern.partition("/")[2], (pattern,)) for pattern in rest),
    ]


def metric_regex(patterns: Sequence[str]) -> str:
    """Matches the names that METRICS' patterns stand for, and no others."""
    choices = "|".join(re.escape(pattern).replace(r"\*", r"\d+") for pattern in patterns)
    return f"^({choices})$"


def build_workspace(entity: str, project: str) -> ws.Workspace:
    """The workspace as it would be saved; builds it without any network. Raises ValueError without the optional extra."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(
            "wandb-workspaces is not installed; run .venv/bin/python -m pip install -e '.[workspace]'"
        )
    import wandb_workspaces.workspaces as ws

    panels = all_workspace_panels()
    sections = [
        ws.Section(
            name=name,
            panels=[_line_plot(panel) for panel in panels if panel.section == name],
            is_open=name in ("Acceptance", "Loss"),
        )
        for name in dict.fromkeys(panel.section for panel in panels)
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def save_workspace(config: Config, entity: str | None) -> str:
    """Make the workspace in the recipe's project; gives its address. Raises ValueError in one line if it cannot be sent."""
    project = config.train.wandb_project
    if project is None:
        raise ValueError("train.wandb_project=null: name the project that the workspace belongs to")
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        raise ValueError(
            f"WANDB_MODE={os.environ['WANDB_MODE']}: a workspace lives on the server; unset it to make one"
        )
    if not os.environ.get("WANDB_API_KEY"):
        raise ValueError(
            "WANDB_API_KEY is not set: a workspace lives on the server; set the key (wandb.ai/authorize), or read the run's own "
            "page, logs/training.html"
        )
    build_workspace(
        "nobody", project
    )  # whether the extra is there is said before the network is asked
    import wandb
    from wandb.errors import Error

    try:
        owner = entity or wandb.Api().default_entity
        if owner is None:
            raise ValueError("the key has no user or team of its own; name one with --entity")
        return build_workspace(owner, project).save().url
    except (Error, OSError) as error:
        raise ValueError(
            f"W&B did not take the workspace ({' '.join(str(error).split())}); check the key, the network and --entity"
        ) from error


def _line_plot(panel: WorkspacePanel) -> wr.LinePlot:
    import wandb_workspaces.reports.v2 as wr

    is_one = len(panel.patterns) == 1 and "*" not in panel.patterns[0]
    return wr.LinePlot(
        title=panel.title,
        x="Step",
        y=list(panel.patterns) if is_one else [],
        metric_regex=None if is_one else metric_regex(panel.patterns),
        log_y=panel.is_log or None,
        plot_type="stacked-area" if panel.is_stacked else "line",
    )


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    logging.getLogger("wandb").setLevel(logging.ERROR)
    sys.stdout.write(f"workspace: {save_workspace(config, options.entity)}\n")


if __name__ == "__main__":
    parser = stage_parser("workspace", "Make the W&B workspace of a recipe's project.")
    parser.add_argument("--entity", help="W&B user or team; default: the key's own")
    run_command(parser, main)
