"""A drafter trained on two ranks at any ZeRO stage is exported by one process, from its float32 weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_ranks import TORCHRUN, launch
from train_runs import make_recipe

from drafter.folder import resolve_checkpoint

ROOT = Path(__file__).parent.parent
STAGES = (0, 1, 2, 3)
EXPORT = """
import sys
from pathlib import Path
import torch
from export.folder import Output
from export.stage import write_checkpoint

for source, out in zip(sys.argv[1::2], sys.argv[2::2]):
    write_checkpoint(Path(source), Path(out), Output("zlab", None))
assert not torch.distributed.is_initialized()
assert "deepspeed" not in sys.modules, "export must not need the trainer's software"
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The last checkpoint of a bf16 run on two ranks, by stage."""
    folder = tmp_path_factory.mktemp("zero")
    recipes = {stage: make_recipe(folder / str(stage)) for stage in STAGES}
    options = ["train.dtype=bfloat16", "train.steps=2", "train.checkpoint_every=2"]
    jobs: list[tuple[Path, list[str], int | None]] = [
        (recipe, [f"train.zero_stage={stage}", *options], None) for stage, recipe in recipes.items()
    ]
    launch(TORCHRUN, jobs, folder)
    runs = {stage: recipe.parent / "run" / "checkpoints" for stage, recipe in recipes.items()}
    return {stage: resolve_checkpoint(run, "last") for stage, run in runs.items()}


def test_any_stage_exports_without_ranks_or_gpu_from_float32_weights(
    checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    outs = {stage: tmp_path / str(stage) for stage in checkpoints}
    pairs = [str(p) for stage in checkpoints for p in (checkpoints[stage], outs[stage])]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *pairs],
        env=alone | hidden,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for stage, out in outs.items():
        master = load_file(checkpoints[stage] / "model.safetensors")
        written = load_file(out / "model.safetensors")
        assert written.keys() == master.keys()
        assert all(torch.equal(t, master[n].bfloat16()) for n, t in written.items()), stage
        # master weights: finer than the bf16 that training computed with
        finer = [n for n, t in master.items() if not torch.equal(t, t.bfloat16().float())]
        assert "fc.weight" in finer, stage
