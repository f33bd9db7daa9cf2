"""A loss or gradient that is not finite: every rank stops before the optimizer moves, the batch is named, the run continues."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_runs import ONE_RANK, make_config, read_curve

from configs.schema import Config
from data.features import open_features
from train.engine import Engine, join_process_group
from train.loop import train_drafter
from train.order import FullOrder
from train.step import StepOutcome, Stepper

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


def spoilt_value(loss: Tensor) -> Tensor:
    return loss * math.nan


def spoilt_gradient(loss: Tensor) -> Tensor:
    """The same value; its derivative is infinite times zero."""
    return loss + (loss * 0).sqrt()


@dataclass
class Poison:
    """Spoils the first micro-batch of one step, once, and notes the steps that the optimizer takes."""

    step: int
    spoil: Callable[[Tensor], Tensor]
    current: int = 0
    taken: list[int] = field(default_factory=list)

    def put(self, patched: pytest.MonkeyPatch) -> None:
        make, accumulate, update = Stepper._loss, Stepper.accumulate, Engine.step

        def loss(stepper: Stepper, *arguments: Any) -> tuple[Tensor, Tensor]:
            found, sums = make(stepper, *arguments)
            if self.current != self.step:
                return found, sums
            self.current = 0
            spoilt = self.spoil(found)
            return spoilt, sums if math.isfinite(spoilt.item()) else sums * math.nan

        def noted(stepper: Stepper, batches: Any, step: int, mean_weight: Any) -> StepOutcome:
            self.current = step + 1
            return accumulate(stepper, batches, step, mean_weight)

        def updated(engine: Engine, learning_rate: float) -> float:
            self.taken.append(self.current)
            return update(engine, learning_rate)

        patched.setattr(Stepper, "_loss", loss)
        patched.setattr(Stepper, "accumulate", noted)
        patched.setattr(Engine, "step", updated)


@pytest.mark.parametrize(
    ("spoil", "step"), [(spoilt_value, 1), (spoilt_gradient, 6), (spoilt_value, 6)]
)
def test_the_optimizer_has_not_moved_and_the_run_goes_on_as_if_nothing_was(
    spoil: Callable[[Tensor], Tensor], step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_config(tmp_path / "whole")
    train_drafter(whole, ONE_RANK)
    config = make_config(tmp_path / "stopped")  # it saves after step 4
    poison = Poison(step, spoil)
    with monkeypatch.context() as patched:
        poison.put(patched)
        with pytest.raises(ValueError, match=f"step {step} is not finite") as caught:
            train_drafter(config, ONE_RANK)
    assert poison.taken == list(range(1, step))
    assert "\n" not in str(caught.value)
    assert named_in(config, step) == batch_of(config, step)
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)


def named_in(config: Config, step: int) -> list[str]:
    path = config.run.folder / "logs" / f"not-finite-step-{step}.json"
    return sorted(json.loads(path.read_text())["sample_ids"])


def batch_of(config: Config, step: int) -> list[str]:
    """Ids of the documents of a step: the data order is a function of the seed and of the samples consumed."""
    entries = open_features(config.run.folder / "features").of_split("train")
    count = config.train.global_batch_samples
    samples = FullOrder(entries, config.run.seed).samples((step - 1) * count, count)
    return sorted(sample.entry.sample_id for sample in samples)


def test_one_poisoned_rank_stops_both_and_both_continue(tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.micro_batch_samples=1")
    whole = make_config(tmp_path / "whole", "train.micro_batch_samples=1")
    train_drafter(whole, ONE_RANK)
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = [
        str(ROOT / "tests" / "not_finite_runs.py"),
        str(tmp_path / "tiny.yaml"),
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, *launcher, *script], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for rank in (0, 1):
        assert "step 5 is not finite" in json.loads((tmp_path / f"said-{rank}.json").read_text())
        index = json.loads((tmp_path / f"index-{rank}.json").read_text())
        assert [entry["step"] for entry in index["checkpoints"]] == [4]
    assert named_in(config, 5) == batch_of(config, 5)
    found, wanted = (
        [line["train/loss"] for line in read_curve(run) if "train/loss" in line]
        for run in (config.run.folder, whole.run.folder)
    )
    assert found == pytest.approx(wanted, rel=1e-4)
    assert torch.isfinite(torch.tensor(found)).all()
