"""One run however it is split: ranks, micro-batches, ZeRO stages, launchers; and stopped or not, the same curve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from train_runs import (
    ONE_RANK,
    killed_after_saving,
    losses_and_norms,
    make_config,
    make_recipe,
    read_curve,
)

from configs.load import load_config
from drafter.folder import load_drafter, resolve_checkpoint
from train.engine import join_process_group
from train.loop import train_drafter

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
WALK = ["train.anchors=walk", "train.walk_refresh_steps=3", "train.num_anchors=4"]


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses and gradient norms of one rank, one document a micro-batch, ZeRO 1, float32.

    Norms too: Adam hides a wrong scale of the gradient.
    """
    join_process_group(ONE_RANK)
    config = make_config(tmp_path_factory.mktemp("reference"))
    train_drafter(config, ONE_RANK)
    return losses_and_norms(config.run.folder)


def launch(
    launcher: Sequence[str], jobs: list[tuple[Path, list[str], int | None]], folder: Path
) -> None:
    """Run the jobs of train_runs.py under a launcher; fails with its output."""
    file = folder / "jobs.json"
    file.write_text(
        json.dumps([[str(recipe), overrides, kill] for recipe, overrides, kill in jobs])
    )
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "tests" / "train_runs.py"), str(file)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = resolve_checkpoint(run / "checkpoints", "last")
    return dict(load_drafter(folder, "cpu", torch.float32).state_dict())


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.micro_batch_samples=4"],
        ["train.micro_batch_samples=2", "train.zero_stage=3"],
        ["train.zero_stage=0", "train.activation_checkpointing=true", "train.head_chunk_rows=7"],
        ["train.zero_stage=2"],
        ["train.pack_tokens=90", "train.pack_blocks=13"],
        ["train.pack_tokens=200", "train.pack_blocks=24", "train.zero_stage=3"],
    ],
)
def test_losses_do_not_depend_on_how_a_batch_is_cut(
    tmp_path: Path, reference: list[float], overrides: list[str]
) -> None:
    config = make_config(tmp_path, *overrides)
    train_drafter(config, ONE_RANK)
    assert losses_and_norms(config.run.folder) == pytest.approx(reference, rel=1e-5)


def test_two_ranks_train_as_one_does_and_resume_exactly_at_any_world_size(
    tmp_path: Path, reference: list[float]
) -> None:
    recipes = {
        name: make_recipe(tmp_path / name)
        for name in (
            *("whole", "halves", "uneven", "packed", "bf16", "bf16-halves", "to-one", "walk"),
            *("muon", "muon-halves"),
        )
    }
    # matrices lie across two ranks' shares: DeepSpeed exchanges the pieces
    muon = ["train.dtype=bfloat16", "train.optimizer=muon"]
    bf16 = ["train.dtype=bfloat16", "train.zero_stage=3"]
    launch(
        TORCHRUN,
        [
            (recipes["whole"], [], None),
            (recipes["halves"], [], 4),
            (recipes["halves"], [], None),
            (recipes["uneven"], ["train.micro_batch_samples=4", "train.zero_stage=2"], None),
            (recipes["packed"], ["train.pack_tokens=60", "train.pack_blocks=12"], None),
            (recipes["walk"], WALK, None),
            (recipes["bf16"], bf16, None),
            (recipes["bf16-halves"], bf16, 4),
            (recipes["bf16-halves"], bf16, None),
            (recipes["muon"], muon, None),
            (recipes["muon-halves"], muon, 4),
            (recipes["muon-halves"], muon, None),
            (recipes["to-one"], [], 4),
        ],
        tmp_path,
    )
    train_drafter(load_config(recipes["to-one"], ["train.zero_stage=3"]), ONE_RANK)
    curves = {name: read_curve(tmp_path / name / "run") for name in recipes}
    assert curves["halves"] == curves["whole"]
    assert curves["bf16-halves"] == curves["bf16"]
    assert curves["muon-halves"] == curves["muon"]
    with_muon = make_config(tmp_path / "muon-alone", *muon)
    train_drafter(with_muon, ONE_RANK)
    assert losses_and_norms(tmp_path / "muon" / "run") == pytest.approx(
        losses_and_norms(with_muon.run.folder),
        rel=0.02,  # bf16 rounds
    )
    alone = make_config(tmp_path / "walk-alone", *WALK)
    train_drafter(alone, ONE_RANK)
    assert losses_and_norms(tmp_path / "walk" / "run") == pytest.approx(
        losses_and_norms(alone.run.folder), rel=1e-5
    )
    for name in ("whole", "uneven", "packed", "to-one"):
        assert losses_and_norms(tmp_path / name / "run") == pytest.approx(reference, rel=1e-5), name
    assert losses_and_norms(tmp_path / "bf16" / "run") == pytest.approx(
        reference, rel=0.1
    )  # bf16 rounds


def test_deepspeed_launcher_trains_as_one_rank_does(tmp_path: Path, reference: list[float]) -> None:
    recipe = make_recipe(tmp_path / "launched")
    launcher = [
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--no_local_rank",
        "--master_port",
        str(free_port()),
    ]
    launch(launcher, [(recipe, [], None)], tmp_path)
    assert losses_and_norms(tmp_path / "launched" / "run") == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_a_killed_run_continues_bit_for_bit(tmp_path: Path, stage: int, dtype: str) -> None:
    check_kill_and_resume(tmp_path, stage, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_continues_bit_for_bit_everywhere(
    tmp_path: Path, stage: int, dtype: str
) -> None:
    check_kill_and_resume(tmp_path, stage, dtype)


def test_a_killed_run_with_walk_anchors_continues_bit_for_bit(tmp_path: Path) -> None:
    """Killed after step 4: between two refreshes of the starts, which come from the checkpoint."""
    check_kill_and_resume(tmp_path, 1, "float32", WALK)


def check_kill_and_resume(folder: Path, stage: int, dtype: str, more: Sequence[str] = ()) -> None:
    overrides = [f"train.zero_stage={stage}", f"train.dtype={dtype}", "train.log_every=3", *more]
    whole = make_config(folder / "whole", *overrides)
    train_drafter(whole, ONE_RANK)
    halves = make_config(folder / "halves", *overrides)
    with killed_after_saving(4):
        train_drafter(halves, ONE_RANK)
    assert (halves.run.folder / "checkpoints" / "step-00000004").is_dir()
    train_drafter(halves, ONE_RANK)
    assert read_curve(halves.run.folder) == read_curve(whole.run.folder)
    found, wanted = weights(halves.run.folder), weights(whole.run.folder)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit_everywhere(tmp_path: Path) -> None:
    jobs: list[tuple[Path, list[str], int | None]] = []
    names = []
    for stage in STAGES:
        for dtype in DTYPES:
            overrides = [f"train.zero_stage={stage}", f"train.dtype={dtype}"]
            name = f"{stage}-{dtype}"
            names.append(name)
            whole, halves = (
                make_recipe(tmp_path / f"{name}-whole"),
                make_recipe(tmp_path / f"{name}-halves"),
            )
            jobs += [(whole, overrides, None), (halves, overrides, 4), (halves, overrides, None)]
    launch(TORCHRUN, jobs, tmp_path)
    for name in names:
        assert read_curve(tmp_path / f"{name}-halves" / "run") == read_curve(
            tmp_path / f"{name}-whole" / "run"
        ), name
