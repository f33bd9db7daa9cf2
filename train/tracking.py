"""Where metrics go: one JSON line a logged step, and W&B (offline without a key, absent when the recipe says null)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from common.step_log import parse_step
from common.wandb_run import start_run
from configs.schema import Config

logger = logging.getLogger(__name__)

METRICS = {
    "train/loss": "nats a slot, cross-entropy averaged with the slot weights, since the last line",
    "train/mean_weight": "mean slot weight",
    "train/loss_share": "share of the recipe's loss; the rest is decayed cross-entropy",
    "train/learning_rate": "of the last step",
    "train/grad_norm": "before clipping, of the last step",
    "train/chain_hits": "leading slots a block whose label is the first choice; at random anchors, no acceptance length",
    "train/tree_hits": "label prefixes a block inside the tree of train.tree_budget; at random anchors, no acceptance length",
    "train/anchor_coverage": "blocks over positions of the documents that could have been an anchor",
    "train/padding": "share of context positions in forwards that no document fills",
    "train/walk_anchors": "share of blocks at starts of real walks (train.anchors: walk)",
    "train/walk_s": "seconds that finding these starts took since the last line, outside of step_s",
    "train/epoch": "passes over the training rows",
    "train/tokens_per_s": "document tokens a second, all ranks",
    "train/anchors_per_s": "blocks a second, all ranks",
    "train/step_s": "seconds a step",
    "train/wait_s": "seconds of a step that the ranks waited for its batch: features were not there yet, or slow to read",
    "speed/tflops_per_s": "10^12 operations a second and device that training needs (train/flops.py); recomputation does not count",
    "speed/mfu": "the same over the device's peak (train.peak_tflops, or known by the GPU's name); absent on a CPU",
    "validation/chain_acceptance": "acceptance length of the chain, macro mean over prompts",
    "validation/tree_acceptance_*": "acceptance length of the tree at budget *, macro mean over prompts",
    "validation/time_s": "seconds of this evaluation",
    "survival/chain_depth_*": "share of anchors whose first * recorded tokens are all accepted, by the chain",
    "survival/tree_*_depth_*": "the same by the tree of train.tree_budget",
    "recall/top_*_slot_*": "share of anchors whose recorded token is among the slot's * likeliest, whatever came before it",
    "calibration/ece": "expected calibration error of path probabilities over nodes of the largest tree, 0..1",
    "calibration/chain_ratio": "accepted tokens the drafter expects over those it gets, at every anchor; above 1: over-confident",
    "calibration/tree_ratio_*": "the same by the tree at budget *",
    "calibration/expected_bin_*": "mean path probability of the nodes in a bin (evaluation/sums.py: BIN_EDGES)",
    "calibration/right_bin_*": "share of these nodes that were right",
    "walk/chain_emits_*": "share of the chain's verify passes that emit * tokens",
    "walk/tree_*_emits_*": "the same by the tree of train.tree_budget",
}
"""Name -> unit and meaning; `*` is a number. W&B makes a section of what stands before the slash."""
TIMES = frozenset(
    {
        "train/tokens_per_s",
        "train/anchors_per_s",
        "train/step_s",
        "train/wait_s",
        "train/walk_s",
        "speed/tflops_per_s",
        "speed/mfu",
        "validation/time_s",
    }
)
"""The only values that differ between two runs of one recipe on one machine."""


class Tracker:
    """The curve of a run; main rank only."""

    def __init__(self, config: Config, wandb_run_id: str | None, after_step: int):
        """Lines of steps after `after_step` are dropped: a resumed run writes them again."""
        self.path = config.run.folder / "logs" / "train.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_lines_after(self.path, after_step)
        self._wandb = start_run(
            config.train.wandb_project,
            config.run.name,
            self.path.parent,
            config.model_dump(mode="json"),
            wandb_run_id,
        )

    @property
    def wandb_run_id(self) -> str | None:
        return self._wandb.id if self._wandb else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line `{"step": ..., name: value, ...}`, on disk when this returns."""
        unknown = [name for name in metrics if not is_metric(name)]
        assert not unknown, f"metrics without a unit: {unknown}"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._wandb:
            self._wandb.log(dict(metrics), step=step)

    def finish(self) -> None:
        if self._wandb:
            self._wandb.finish()


def metric_pattern(name: str) -> str:
    """The name's entry in METRICS: itself, or with `*` for its numbers."""
    return name if name in METRICS else re.sub(r"(?<=_)\d+(?=_|$)", "*", name)


def is_metric(name: str) -> bool:
    return metric_pattern(name) in METRICS


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`; a last line cut short by a kill is dropped, and with a warning any that is no record."""
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        record = parse_step(line)
        if record is None and line.endswith(b"\n"):
            logger.warning("%s line %d is no record of a step and is dropped", path, number)
        elif record is not None and line.endswith(b"\n") and record["step"] <= step:
            kept.append(line)
    aside = path.with_suffix(".tmp")
    aside.write_bytes(b"".join(kept))
    aside.replace(path)
