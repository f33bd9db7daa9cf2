"""A run's life: refusals, damage, signals, kills, continuation, what is written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_runs import (
    ONE_RANK,
    killed_after_saving,
    losses,
    make_config,
    make_recipe,
    read_curve,
    write_features,
)

from common.files import read_json, sha256_file
from configs.load import load_config
from configs.schema import Config
from drafter.folder import read_drafter_config, resolve_checkpoint
from target.head import TargetHead, load_target_head
from train.checkpoint import Checkpoints, IndexEntry, best_entry
from train.engine import join_process_group
from train.loop import train_drafter
from train.walks import walk_documents

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


def checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(config.run.folder / "checkpoints", config.train.keep_checkpoints)


def test_training_learns_and_its_checkpoint_is_a_drafter_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.steps=40", "train.checkpoint_every=100")
    train_drafter(config, ONE_RANK)
    curve = losses(config.run.folder)
    assert sum(curve[-3:]) < 0.5 * sum(curve[:3])
    assert all(math.isfinite(value) for value in curve)
    folder = resolve_checkpoint(config.run.folder / "checkpoints", "best")
    assert read_drafter_config(folder).target_layer_ids == config.drafter.target_layer_ids
    moments = load_file(folder / "optimizer.safetensors")
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    names = set(load_file(folder / "model.safetensors"))
    assert set(moments) == {
        f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names
    }


@pytest.mark.parametrize("loss", ["ce", "dpace", "auf", "chain", "tree_live", "tree_surrogate"])
def test_the_other_losses_train_too(tmp_path: Path, loss: str) -> None:
    config = make_config(tmp_path, f"train.loss={loss}", "train.steps=20", "train.schedule=cosine")
    train_drafter(config, ONE_RANK)
    curve = losses(config.run.folder)
    assert curve[-1] < 0.8 * curve[0]


def test_newest_best_and_decay_start_are_kept(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, "train.steps=10", "train.checkpoint_every=1", "train.eval_every=1",
        "train.keep_checkpoints=2",
    )  # fmt: skip
    train_drafter(config, ONE_RANK)
    folder = config.run.folder / "checkpoints"
    index = read_json(folder / "index.json", "")
    steps = [entry["step"] for entry in index["checkpoints"]]
    accepted = {
        line["step"]: line["validation/tree_acceptance_8"]
        for line in read_curve(config.run.folder)
        if "validation/tree_acceptance_8" in line
    }
    best = max(accepted, key=lambda step: (accepted[step], -step))
    assert set(steps) == {best, 8, 9, 10}
    assert index["last"] == "step-00000010"
    assert index["best"] == f"step-{best:08d}"
    assert {path.name for path in folder.glob("step-*")} == {
        e["folder"] for e in index["checkpoints"]
    }


def test_only_acceptance_on_the_same_rows_is_compared() -> None:
    def entry(step: int, accepted: float | None, judged_on: str) -> IndexEntry:
        return IndexEntry(f"step-{step}", step, {}, accepted, judged_on)

    easy, hard = entry(1, 4.5, "8 samples"), entry(2, 4.0, "64 samples")
    later, unjudged = entry(3, 4.0, "64 samples"), entry(4, None, "64 samples")
    assert best_entry([easy]) == easy
    assert best_entry([easy, hard, later, unjudged]) == hard
    assert best_entry([unjudged]) is None


def test_a_kill_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_config(tmp_path / "whole")
    train_drafter(whole, ONE_RANK)
    config = make_config(tmp_path / "killed")
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    folder = config.run.folder / "checkpoints"
    # what a kill in the save of step 8 can leave: a folder aside, and a whole folder not yet listed
    (folder / ".step-00000008.1.tmp").mkdir()
    (folder / ".step-00000008.1.tmp" / "model.safetensors").write_bytes(b"half")
    (folder / "step-00000008").mkdir()
    (folder / "step-00000008" / "model.safetensors").write_bytes(b"whole, but not listed")
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)
    assert not list(folder.glob(".*"))


def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_config(tmp_path / "whole")
    train_drafter(whole, ONE_RANK)
    config = make_config(tmp_path / "damaged", "train.checkpoint_every=2")
    with killed_after_saving(6):
        train_drafter(config, ONE_RANK)
    file = config.run.folder / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    train_drafter(config, ONE_RANK)
    assert "optimizer.safetensors differs from its sha256" in caplog.text
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)


def test_without_a_whole_checkpoint_nothing_is_overwritten(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train_drafter(config, ONE_RANK)
    for file in checkpoints(config).folder.glob("step-*/model.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        train_drafter(config, ONE_RANK)


def test_a_finished_run_stays_as_it_is(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train_drafter(config, ONE_RANK)
    before = (config.run.folder / "logs" / "train.jsonl").read_bytes()
    train_drafter(config, ONE_RANK)
    assert (config.run.folder / "logs" / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("train.learning_rate=0.5", r"train\.learning_rate=0\.01, this run has 0\.5"),
        ("drafter.block_size=4", r"drafter\.block_size=5, this run has 4"),
        ("train.loss=ce", r"train\.loss='tree', this run has 'ce'"),
        ("train.global_batch_samples=2", r"train\.global_batch_samples=4, this run has 2"),
        ("run.seed=1", r"run\.seed=0, this run has 1"),
    ],
)
def test_other_settings_are_refused_with_both_values(
    tmp_path: Path, override: str, shown: str
) -> None:
    with killed_after_saving(4):
        train_drafter(make_config(tmp_path), ONE_RANK)
    with pytest.raises(ValueError, match=shown):
        train_drafter(load_config(tmp_path / "tiny.yaml", [override]), ONE_RANK)


def forget_younger_settings(config: Config, *keys: str) -> None:
    """Make the run's checkpoints look as if written before these settings and the newer sums existed."""
    folder = config.run.folder / "checkpoints"
    index = read_json(folder / "index.json", "")
    for entry in index["checkpoints"]:
        path = folder / entry["folder"] / "state.json"
        value = read_json(path, "")
        for key in keys:
            del value["settings"][key]
        value["state"]["window"] = value["state"]["window"][:8]
        del value["state"]["walk_starts"]
        path.write_text(json.dumps(value))
        entry["sha256"]["state.json"] = sha256_file(path)
    (folder / "index.json").write_text(json.dumps(index))


def test_a_setting_that_the_run_does_not_read_may_change(tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.loss=dpace")
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    for override, message in (
        ("train.dpace_alpha=0.4", r"train\.dpace_alpha=0\.5, this run has 0\.4"),
        ("train.anchors=walk", r"train\.anchors='uniform', this run has 'walk'"),
        ("train.tree_temperature_nats=1", None),
        ("train.walk_share=0.3", None),
    ):
        other = load_config(tmp_path / "tiny.yaml", ["train.loss=dpace", override])
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            train_drafter(other, ONE_RANK)
    assert read_curve(config.run.folder)[-1]["step"] == config.train.steps


def test_a_tree_checkpoint_from_before_the_walk_power_had_none(tmp_path: Path) -> None:
    same = ["train.loss=tree", "train.walk_power=0"]
    config = make_config(tmp_path, *same)
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    forget_younger_settings(config, "train.walk_power")
    other = load_config(tmp_path / "tiny.yaml", ["train.loss=tree"])
    with pytest.raises(ValueError, match=r"train\.walk_power=\{\}, this run has \{'tree': 1"):
        train_drafter(other, ONE_RANK)
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder)[-1]["step"] == config.train.steps


def test_a_checkpoint_older_than_a_setting_continues_with_its_default_only(tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.log_every=3")
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    forget_younger_settings(config, "train.anchors", "train.surrogate_temperatures_nats")
    other = load_config(tmp_path / "tiny.yaml", ["train.log_every=3", "train.anchors=walk"])
    with pytest.raises(ValueError, match=r"train\.anchors='uniform', this run has 'walk'"):
        train_drafter(other, ONE_RANK)
    train_drafter(config, ONE_RANK)
    whole = make_config(tmp_path / "whole", "train.log_every=3")
    train_drafter(whole, ONE_RANK)
    lines = zip(read_curve(config.run.folder), read_curve(whole.run.folder), strict=True)
    younger = {"train/anchor_coverage", "train/padding"}  # sums that the old window does not have
    for found, wanted in lines:
        assert {k: v for k, v in found.items() if k not in younger} == {
            k: v for k, v in wanted.items() if k not in younger
        }


def test_other_features_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    write_features(config.run.folder / "features", seed=1)
    with pytest.raises(ValueError, match="made with features="):
        train_drafter(config, ONE_RANK)


def test_taps_must_be_those_of_the_features(tmp_path: Path) -> None:
    config = make_config(tmp_path, "drafter.target_layer_ids=[0, 2]")
    with pytest.raises(ValueError, match=r"target_layer_ids=\(1, 2\), this run has \(0, 2\)"):
        train_drafter(config, ONE_RANK)


def test_wsd_is_continued_from_where_its_decay_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, "train.steps=10", "train.keep_checkpoints=1")
    train_drafter(config, ONE_RANK)
    first = read_curve(config.run.folder)
    # a half of 17 steps is warm-up, of 16 not: at step 8 all steps are the loss' own
    with pytest.raises(ValueError, match=r"this run has 17, .*; at most train\.steps=16 from here"):
        train_drafter(load_config(tmp_path / "tiny.yaml", ["train.steps=17"]), ONE_RANK)
    head = Path(config.features_location) / "target_head.safetensors"
    sound = head.read_bytes()
    head.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"target_head\.safetensors"):
        train_drafter(load_config(tmp_path / "tiny.yaml", ["train.steps=15"]), ONE_RANK)
    assert "drops" not in caplog.text, "a start that is refused costs no checkpoint"
    head.write_bytes(sound)
    train_drafter(load_config(tmp_path / "tiny.yaml", ["train.steps=15"]), ONE_RANK)
    assert "continuing after step 8 drops step-00000010" in caplog.text
    curve = read_curve(config.run.folder)
    # the steps before the first run's decay stay, the others are taken again at the stable rate
    assert [line for line in first if line["step"] <= 8] == [
        line for line in curve if line["step"] <= 8
    ]
    rates = {
        line["step"]: line["train/learning_rate"] for line in curve if "train/learning_rate" in line
    }
    assert sorted(rates) == list(range(1, 16))
    assert {rates[step] for step in range(8, 13)} == {0.01}
    assert rates[15] < 0.005


def test_cosine_is_not_continued_with_other_steps(tmp_path: Path) -> None:
    train_drafter(make_config(tmp_path, "train.schedule=cosine"), ONE_RANK)
    other = load_config(tmp_path / "tiny.yaml", ["train.schedule=cosine", "train.steps=9"])
    with pytest.raises(ValueError, match=r"train\.steps=8, this run has 9"):
        train_drafter(other, ONE_RANK)


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    newest = (config.run.folder / "checkpoints" / "index.json").read_bytes()

    def poisoned(*arguments: Any) -> TargetHead:
        head = load_target_head(*arguments)
        head.embedding[3, 0] = math.nan
        return head

    monkeypatch.setattr("train.loop.load_target_head", poisoned)
    with pytest.raises(ValueError, match="step 5 is not finite") as caught:
        train_drafter(config, ONE_RANK)
    file = config.run.folder / "logs" / "not-finite-step-5.json"
    assert str(file) in str(caught.value)
    assert len(json.loads(file.read_text())["sample_ids"]) == config.train.global_batch_samples
    assert (config.run.folder / "checkpoints" / "index.json").read_bytes() == newest


def test_a_corrupt_shard_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shard = config.run.folder / "features" / "shard-000000.parquet"
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = b"\0" * 64
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-000000\.parquet"):
        train_drafter(config, ONE_RANK)


def test_missing_features_name_the_stage_to_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (config.run.folder / "features" / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="extract"):
        train_drafter(config, ONE_RANK)


def test_sigterm_saves_and_kill_loses_little_and_both_continue_exactly(tmp_path: Path) -> None:
    settings = ["train.steps=60", "train.checkpoint_every=10", "train.eval_every=60"]
    whole = make_config(tmp_path / "whole", *settings)
    train_drafter(whole, ONE_RANK)
    recipe = make_recipe(tmp_path / "stopped")
    run = tmp_path / "stopped" / "run"

    process = start(recipe, settings)
    wait_for_steps(process, run, 5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    saved = read_json(run / "checkpoints" / "index.json", "")["checkpoints"][-1]["step"]
    assert saved == read_curve(run)[-1]["step"] < 60

    process = start(recipe, settings)
    wait_for_steps(process, run, saved + 2)
    process.kill()
    process.communicate(timeout=120)

    config = load_config(recipe, settings)
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)


def start(recipe: Path, settings: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "train", str(recipe), *settings],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not (run / "logs" / "train.jsonl").exists() or len(read_curve(run)) < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("refresh", [0, 1])
def test_sigterm_during_a_walk_stops_there_and_the_run_continues_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refresh: int
) -> None:
    """Before the first step, or between two: the walk is not finished first, and begins again."""
    settings = ["train.steps=6", "train.anchors=walk", "train.walk_refresh_steps=3"]
    whole = make_config(tmp_path / "whole", *settings)
    train_drafter(whole, ONE_RANK)
    config = make_config(tmp_path / "stopped", *settings)
    given: list[int] = []

    def stopped_once(*asked: Any) -> Iterator[tuple[str, list[int]]]:
        number = len(given)
        given.append(0)
        for found in walk_documents(*asked):
            if number == refresh:
                os.kill(os.getpid(), signal.SIGTERM)
            given[number] += 1
            yield found

    with monkeypatch.context() as patched:
        patched.setattr("train.walks.walk_documents", stopped_once)
        patched.setattr("train.walks._by_length", lambda entries, limit: [(limit, [*entries])])
        with pytest.raises(SystemExit) as left:
            train_drafter(config, ONE_RANK)
    assert left.value.code == 143
    assert given[refresh] == 1
    assert len(given) == refresh + 1
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)


def test_a_continued_run_has_walk_starts_for_its_new_steps(tmp_path: Path) -> None:
    """The last refresh of the shorter run looked as far as its own end."""
    walk = [
        "train.anchors=walk",
        "train.walk_refresh_steps=8",
        "train.walk_share=1.0",
        "train.vocabulary=corpus",
    ]
    settled = [
        "train.ce_warmup_fraction=0",
        "train.crossfade_fraction=0",
        "train.lr_warmup_fraction=0",
    ]
    for steps in (2, 8):
        config = make_config(
            tmp_path, *walk, *settled, f"train.steps={steps}", "train.lr_decay_fraction=0.5"
        )
        train_drafter(config, ONE_RANK)
    lines = (config.run.folder / "logs" / "train.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines if "train/walk_anchors" in line]
    assert [line["step"] for line in logged] == list(range(1, 9))
    assert min(line["train/walk_anchors"] for line in logged) > 0.1
    walked = [line["step"] for line in logged if line["train/walk_s"] > 0]
    assert walked == [1, 2]  # the second run continues after step 1, where the first began to decay
