"""Frozen parts stay as they were, take no part in training, and are whole again wherever a drafter is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_runs import ONE_RANK, killed_after_saving, make_config, make_recipe, read_curve

from configs.load import load_config
from configs.schema import Config
from drafter.config import drafter_config
from drafter.folder import (
    drafter_fingerprint,
    load_drafter,
    resolve_checkpoint,
    write_drafter,
)
from drafter.model import Drafter
from export.convert import main, parser
from train.engine import join_process_group
from train.freeze import frozen_names
from train.initialise import initial_drafter
from train.loop import train_drafter

FROZEN = "train.freeze=[fc, layers.0, 'layers.1.mlp.*_proj.weight']"


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


def released(folder: Path, seed: int = 7) -> dict[str, torch.Tensor]:
    """A drafter to start from, in bfloat16 as released ones are."""
    shape = drafter_config(load_config(make_recipe(folder.parent / "shape")))
    torch.manual_seed(seed)
    state = {name: value * 1.01 for name, value in Drafter(shape).state_dict().items()}
    write_drafter(folder, shape, state, torch.bfloat16)
    return {name: value.bfloat16().float() for name, value in state.items()}


def recipe_of(tmp_path: Path, name: str, *overrides: str) -> Config:
    return make_config(
        tmp_path / name, f"train.init_from={tmp_path / 'released'}", FROZEN, *overrides
    )


def is_frozen(name: str) -> bool:
    return name.startswith(("fc.", "layers.0.", "layers.1.mlp."))


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        (0, "float32", ()),
        pytest.param(0, "bfloat16", (), marks=pytest.mark.slow),
        pytest.param(1, "float32", ("train.weight_decay=0.1",), marks=pytest.mark.slow),
        (1, "bfloat16", ("train.optimizer=muon",)),
        pytest.param(2, "bfloat16", ("train.offload=optimizer",), marks=pytest.mark.slow),
        (3, "float32", ()),
        pytest.param(3, "bfloat16", (), marks=pytest.mark.slow),
    ],
)
def test_frozen_parts_stay_bit_for_bit_and_are_in_no_optimizer_and_no_checkpoint(
    tmp_path: Path, stage: int, dtype: str, more: tuple[str, ...]
) -> None:
    source = released(tmp_path / "released")
    settings = [f"train.zero_stage={stage}", f"train.dtype={dtype}", "train.steps=5", *more]
    config = recipe_of(tmp_path, "run", *settings, "train.checkpoint_every=2")
    with killed_after_saving(2):
        train_drafter(config, ONE_RANK)
    train_drafter(config, ONE_RANK)
    folder = resolve_checkpoint(config.run.folder / "checkpoints", "last")
    stored = load_file(folder / "model.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    assert {name for name in source if name not in stored} == set(filter(is_frozen, source))
    assert {name.split(".", 1)[1] for name in moments} == set(stored)
    found = load_drafter(folder, "cpu", torch.float32).state_dict()
    for name, value in source.items():
        assert torch.equal(found[name], value) == is_frozen(name), name
    whole = recipe_of(tmp_path, "whole", *settings, "train.checkpoint_every=2")
    train_drafter(whole, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(whole.run.folder)


def test_the_frozen_part_is_written_once_and_counts_in_the_fingerprint(tmp_path: Path) -> None:
    released(tmp_path / "released")
    config = recipe_of(tmp_path, "run", "train.steps=2", "train.checkpoint_every=1")
    train_drafter(config, ONE_RANK)
    checkpoints = config.run.folder / "checkpoints"
    assert [path.name for path in checkpoints.glob("*.safetensors")] == ["frozen.safetensors"]
    folder = resolve_checkpoint(checkpoints, "last")
    before = drafter_fingerprint(folder)
    tensors = load_file(checkpoints / "frozen.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, checkpoints / "frozen.safetensors")
    for use in (drafter_fingerprint, lambda path: load_drafter(path, "cpu", torch.float32)):
        with pytest.raises(ValueError, match="its sha256 differs"):
            use(folder)
    # a run that goes on writes it again, from where it came
    resumed = recipe_config(config, "train.steps=2", "train.eval_every=1")
    shutil.rmtree(folder)
    train_drafter(resumed, ONE_RANK)
    assert drafter_fingerprint(folder) == before


def recipe_config(config: Config, *overrides: str) -> Config:
    """The same run with other overrides."""
    recipe = config.run.folder.parent / "tiny.yaml"
    start = f"train.init_from={config.train.init_from}"
    return load_config(recipe, [start, FROZEN, *overrides])


def test_a_checkpoint_away_from_its_run_says_what_it_lacks(tmp_path: Path) -> None:
    released(tmp_path / "released")
    config = recipe_of(tmp_path, "run", "train.steps=1")
    train_drafter(config, ONE_RANK)
    folder = resolve_checkpoint(config.run.folder / "checkpoints", "last")
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "drafter")
    with pytest.raises(FileNotFoundError, match=r"frozen\.safetensors is missing.*export"):
        load_drafter(moved, "cpu", torch.float32)


def test_an_export_of_a_checkpoint_is_whole_and_a_run_may_start_from_either(tmp_path: Path) -> None:
    released(tmp_path / "released")
    config = recipe_of(tmp_path, "run", "train.steps=2")
    train_drafter(config, ONE_RANK)
    folder = resolve_checkpoint(config.run.folder / "checkpoints", "last")
    wanted = load_drafter(folder, "cpu", torch.float32).state_dict()
    out = tmp_path / "elsewhere" / "exported"
    main(parser().parse_args([str(folder), str(out), "--to", "zlab"]))
    assert set(load_file(out / "model.safetensors")) == set(wanted)
    assert not (out / "frozen.json").exists()
    for source in (folder, out):
        started = initial_drafter(make_config(tmp_path / "next", f"train.init_from={source}"))
        found = started.state_dict()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
            if source == folder:
                assert torch.equal(found[name], value)


def test_a_source_that_changed_is_refused_before_a_run_goes_on(tmp_path: Path) -> None:
    released(tmp_path / "released")
    config = recipe_of(tmp_path, "run")
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    released(tmp_path / "released", seed=8)
    with pytest.raises(ValueError, match=r"made beside other values than train\.init_from has now"):
        train_drafter(config, ONE_RANK)


def test_a_run_with_other_frozen_parts_is_another_run(tmp_path: Path) -> None:
    released(tmp_path / "released")
    start = f"train.init_from={tmp_path / 'released'}"
    config = make_config(tmp_path / "run", start)
    with killed_after_saving(4):
        train_drafter(config, ONE_RANK)
    other = load_config(tmp_path / "run" / "tiny.yaml", [start, "train.freeze=[fc]"])
    with pytest.raises(ValueError, match=r"train\.freeze=\[\], this run has \['fc'\]"):
        train_drafter(other, ONE_RANK)
    frozen = recipe_of(tmp_path, "frozen")
    with killed_after_saving(4):
        train_drafter(frozen, ONE_RANK)
    thawed = load_config(tmp_path / "frozen" / "tiny.yaml", [start])
    with pytest.raises(ValueError, match=r"train\.freeze=\['fc', .*\], this run has \[\]"):
        train_drafter(thawed, ONE_RANK)


def test_patterns_are_names_modules_or_stars(tmp_path: Path) -> None:
    names = [name for name, _ in initial_drafter(make_config(tmp_path)).named_parameters()]
    assert frozen_names(["fc"], names) == {"fc.weight"}
    assert frozen_names(["norm.weight"], names) == {"norm.weight"}
    layer = {name for name in names if name.startswith("layers.1.")}
    assert frozen_names(["layers.1"], names) == layer == frozen_names(["layers.1.*"], names)
    assert frozen_names(["*layernorm*"], names) == {name for name in names if "layernorm" in name}
    with pytest.raises(ValueError, match=r"'layer\.0' names no parameter.*layers\.0"):
        frozen_names(["layer.0"], names)
    with pytest.raises(ValueError, match="leaves nothing to train"):
        frozen_names(["fc", "hidden_norm", "norm", "layers"], names)
    with pytest.raises(ValueError, match=r"train\.freeze=\['fc'\] without train\.init_from"):
        make_config(tmp_path / "random", "train.freeze=[fc]")
