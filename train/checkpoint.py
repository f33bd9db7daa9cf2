"""Checkpoints of our own: whole tensors by name, readable at any world size and ZeRO stage, no pickle.

checkpoints/index.json            only folders listed here count; written after a folder is complete
checkpoints/frozen.safetensors    what train.freeze leaves alone, once for all of them (drafter/frozen.py)
checkpoints/step-00000400/        a drafter folder in float32 (config.json, model.safetensors), and what resuming needs:
                                  optimizer.safetensors (exp_avg.NAME and so on, float32), state.json
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.distributed import Ranks, raise_together
from common.files import (
    atomic_path,
    fields_of,
    read_json,
    remove_leftovers,
    sha256_file,
    write_json,
)
from drafter.folder import CONFIG_FILE, WEIGHTS_FILE, write_drafter
from drafter.frozen import FROZEN_FILE, frozen_sum, write_frozen_reference, write_frozen_weights
from drafter.model import Drafter
from drafter.weights import OPTIMIZER_FILE
from train.engine import Engine
from train.full_state import FullParameter, read_full_state, write_full_state

logger = logging.getLogger(__name__)

STATE_FILE, INDEX_FILE = "state.json", "index.json"
FILES = (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE)
REMEDY = "delete the checkpoints folder to start again"


@dataclass
class TrainState:
    """Everything about a run that is not a tensor. There is no random state: all draws are functions of the seed."""

    step: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    """Samples consumed."""
    mean_weight: float | None = None
    """Mean slot weight of the last step, over all ranks: part of the next step's normaliser."""
    window: list[float] = field(default_factory=list)
    """BatchSums since the last logged line, so that the line after a resume is the same."""
    wandb_run_id: str | None = None
    walk_starts: dict[str, list[int]] = field(default_factory=dict)
    """By sample id, of the documents up to the next refresh (train/walks.py); empty for uniform anchors."""


@dataclass(frozen=True)
class IndexEntry:
    folder: str
    step: int
    sha256: dict[str, str]
    tree_acceptance: float | None
    """Acceptance length of the tree at train.tree_budget on validation rows; null if not evaluated at this step."""
    judged_on: str = ""
    """Rows and temperature of that acceptance: only equal ones compare."""
    decay_start: bool = False
    """The last one before wsd's decay: kept, so that a finished run can be continued with more steps."""


@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained."""

    names: list[str]
    sha256: str


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run."""

    folder: Path
    keep: int
    """Newest ones kept, besides the best and the one where the decay starts."""
    frozen: Frozen | None = None
    """What they all share and none of them holds."""
    judged_on: str = ""
    """Of those that are saved now."""

    def entries(self) -> list[IndexEntry]:
        """Oldest first. Raises ValueError if the index is not one."""
        path = self.folder / INDEX_FILE
        if not path.exists():
            return []
        value = read_json(path, REMEDY)
        with fields_of(path, REMEDY):
            return [IndexEntry(**entry) for entry in value["checkpoints"]]

    def whole_entries(self) -> Iterator[IndexEntry]:
        """Newest first; a damaged one is named and passed over. Sums are checked as an entry is reached."""
        for entry in reversed(self.entries()):
            damage = self._damage(entry)
            if damage is None:
                yield entry
            else:
                logger.warning("checkpoint %s is not used: %s", self.folder / entry.folder, damage)

    def read_state(self, entry: IndexEntry) -> tuple[TrainState, dict[str, Any]]:
        """The state and the settings of the run that wrote it."""
        path = self.folder / entry.folder / STATE_FILE
        value = read_json(path, REMEDY)
        with fields_of(path, REMEDY):
            return TrainState(**value["state"]), dict(value["settings"])

    def restore(self, entry: IndexEntry, engine: Engine) -> None:
        """Weights and moments into the engine, on every rank."""
        folder = self.folder / entry.folder
        with (
            safe_open(folder / WEIGHTS_FILE, "pt") as weights,
            safe_open(folder / OPTIMIZER_FILE, "pt") as moments,
        ):

            def read(name: str) -> FullParameter:
                own = {key: moments.get_tensor(f"{key}.{name}") for key in engine.moments[name]}
                return FullParameter(name, weights.get_tensor(name), own)

            write_full_state(engine, read, entry.step)

    def save(
        self,
        engine: Engine,
        state: TrainState,
        settings: dict[str, Any],
        tree_acceptance: float | None,
        decay_start: bool,
        ranks: Ranks,
    ) -> None:
        """Write a checkpoint, list it, delete those no longer kept. Collective; a rank that cannot write stops all."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        for parameter in read_full_state(engine):
            if ranks.is_main:
                # copies: what is read may be the optimizer's own storage
                weights[parameter.name] = parameter.weight.to("cpu", torch.float32, copy=True)
                for key, value in parameter.moments.items():
                    moments[f"{key}.{parameter.name}"] = value.to("cpu", torch.float32, copy=True)
        with raise_together(ranks):
            if ranks.is_main:
                folder = self.folder / f"step-{state.step:08d}"
                with atomic_path(folder) as aside:
                    self._write_weights(aside, engine, weights)
                    save_file(moments, aside / OPTIMIZER_FILE)
                    write_json(
                        aside / STATE_FILE,
                        {
                            "format": "dflash-checkpoint",
                            "version": 1,
                            "state": asdict(state),
                            "settings": settings,
                        },
                    )
                    files = [*FILES, *([FROZEN_FILE] if self.frozen else [])]
                    sums = {file: sha256_file(aside / file) for file in files}
                self._list(
                    IndexEntry(
                        folder.name, state.step, sums, tree_acceptance, self.judged_on, decay_start
                    )
                )

    def _write_weights(self, folder: Path, engine: Engine, weights: dict[str, Tensor]) -> None:
        frozen = self.frozen.names if self.frozen else ()
        write_drafter(folder, engine.drafter.config, weights, torch.float32, frozen)
        if self.frozen:
            write_frozen_reference(folder, self.frozen.sha256, self.frozen.names)

    def with_frozen(self, drafter: Drafter) -> Checkpoints:
        """The same, sharing what of `drafter` is not trained, written now. Main rank only, before training starts.

        Raises ValueError if checkpoints to be continued were made beside other values: their source has changed.
        """
        found = {n: p.float() for n, p in drafter.named_parameters() if not p.requires_grad}
        if not found:
            return self
        sums = (frozen_sum(self.folder / entry.folder) for entry in self.entries())
        sha256 = write_frozen_weights(self.folder, found, {sum for sum in sums if sum is not None})
        return replace(self, frozen=Frozen(sorted(found), sha256))

    def forget_after(self, step: int) -> None:
        """Drop checkpoints of later steps, named in a warning, and whatever a killed writer left.

        Main rank only, before training starts.
        """
        if not self.folder.is_dir():
            return
        remove_leftovers(self.folder)
        kept = [entry for entry in self.entries() if entry.step <= step]
        dropped = [entry.folder for entry in self.entries() if entry.step > step]
        if dropped:
            logger.warning("continuing after step %d drops %s", step, ", ".join(dropped))
        self._write(kept)

    def _list(self, new: IndexEntry) -> None:
        entries = [entry for entry in self.entries() if entry.step < new.step] + [new]
        best = best_entry(entries)
        kept = entries[-self.keep :]
        self._write([e for e in entries if e in kept or e is best or e.decay_start])

    def _write(self, entries: list[IndexEntry]) -> None:
        """The index first, then the folders it no longer names: a kill in between leaves rubbish, never a hole."""
        best = best_entry(entries)
        write_json(
            self.folder / INDEX_FILE,
            {
                "checkpoints": [asdict(entry) for entry in entries],
                "last": entries[-1].folder if entries else None,
                "best": best.folder if best else None,
            },
        )
        listed = {entry.folder for entry in entries}
        for folder in self.folder.glob("step-*"):
            if folder.name not in listed:
                shutil.rmtree(folder)

    def _damage(self, entry: IndexEntry) -> str | None:
        for file, wanted in entry.sha256.items():
            path = self.folder / entry.folder / file
            if not path.is_file():
                return f"{file} is missing"
            if sha256_file(path) != wanted:
                return f"{file} differs from its sha256 in {INDEX_FILE}"
        return None


def best_entry(entries: list[IndexEntry]) -> IndexEntry | None:
    """By tree acceptance, the earlier of equals, of those judged as the newest one was; None if none was evaluated."""
    evaluated = [entry for entry in entries if entry.tree_acceptance is not None]
    comparable = [entry for entry in evaluated if entry.judged_on == evaluated[-1].judged_on]
    return max(comparable, key=lambda entry: entry.tree_acceptance or 0.0, default=None)
