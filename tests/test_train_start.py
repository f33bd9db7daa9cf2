"""Before the first step: initialisation, schedules, plans, trackers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_runs import make_config

from configs.load import load_config
from configs.schema import Config
from data.corpus import CorpusManifest, ShardEntry
from drafter.config import drafter_config
from drafter.folder import write_drafter
from drafter.model import Drafter
from target.load import Target
from train.initialise import initial_drafter
from train.plan import plan_train
from train.schedule import learning_rate, loss_share
from train.tracking import Tracker, drop_lines_after

LLAMA_SHAPED = ["drafter.rope_theta=10000.0", "train.init_from=target_layers"]


@pytest.fixture
def from_target(tiny_config: Callable[..., Config]) -> Callable[..., Config]:
    return lambda family, *more: tiny_config(family, [*LLAMA_SHAPED, *more])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_target_layers_are_the_targets_last_ones(
    from_target: Callable[..., Config], tiny_target: Callable[..., Target], family: str
) -> None:
    target = tiny_target(family)
    wanted = target.text_model.state_dict()
    layer = "layers.0.self_attn"
    head_dim = target.model.config.head_dim
    sizes = [
        f"drafter.head_dim={head_dim}",
        f"drafter.num_attention_heads={len(wanted[f'{layer}.q_proj.weight']) // head_dim}",
        f"drafter.num_key_value_heads={len(wanted[f'{layer}.k_proj.weight']) // head_dim}",
        f"drafter.intermediate_size={len(wanted['layers.0.mlp.up_proj.weight'])}",
    ]
    drafter = initial_drafter(from_target(family, *sizes))
    state = drafter.state_dict()
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        for layer in (0, 1):
            torch.testing.assert_close(
                state[f"layers.{layer}.{name}"], wanted[f"layers.{4 + layer}.{name}"]
            )
    torch.testing.assert_close(state["norm.weight"], wanted["norm.weight"])
    features = torch.randn(7, 3, 64)
    torch.testing.assert_close(drafter.fc(features.flatten(1)), features[:, -1])
    if family == "llama":
        # queries of unit-RMS inputs keep the scale they have in the target, on average over directions
        inputs = torch.randn(4000, 64) * state["layers.0.input_layernorm.weight"]
        queries = inputs @ state["layers.0.self_attn.q_proj.weight"].T
        scale = state["layers.0.self_attn.q_norm.weight"]
        assert scale[0].item() == pytest.approx(queries.square().mean().sqrt().item(), rel=0.05)


def test_target_layers_of_another_shape_are_refused(from_target: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight has shape .* \[96, 64\]"):
        initial_drafter(from_target("llama", "drafter.intermediate_size=96"))


def test_target_layers_need_the_targets_rotation(from_target: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match=r"rope_theta=10000\.0, this run has 5\.0"):
        initial_drafter(from_target("llama", "drafter.rope_theta=5.0"))


def test_a_drafter_folder_is_continued_and_must_fit(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    torch.manual_seed(7)
    shape = drafter_config(config)
    released = Drafter(shape).state_dict()
    write_drafter(tmp_path / "released", shape, dict(released), torch.float32)
    start = load_config(tmp_path / "tiny.yaml", [f"train.init_from={tmp_path / 'released'}"])
    found = initial_drafter(start).state_dict()
    assert all(torch.equal(found[name], released[name]) for name in released)
    other = ["drafter.block_size=4", f"train.init_from={tmp_path / 'released'}"]
    with pytest.raises(ValueError, match="block_size=5, this run has 4"):
        initial_drafter(load_config(tmp_path / "tiny.yaml", other))


def test_random_initialisation_follows_the_seed(tmp_path: Path) -> None:
    one, two = (initial_drafter(make_config(tmp_path, f"run.seed={s}")) for s in (0, 1))
    again = initial_drafter(make_config(tmp_path))
    assert torch.equal(one.fc.weight, again.fc.weight)
    assert not torch.equal(one.fc.weight, two.fc.weight)


def test_learning_rates_and_loss_shares_of_a_hundred_steps(tmp_path: Path) -> None:
    wsd = make_config(
        tmp_path, "train.steps=100", "train.learning_rate=1.0", "train.lr_warmup_fraction=0.1",
        "train.lr_decay_fraction=0.2", "train.ce_warmup_fraction=0.2", "train.crossfade_fraction=0.1",
    ).train  # fmt: skip
    at = [learning_rate(step, wsd) for step in range(100)]
    assert at[0] == pytest.approx(0.1)
    assert at[9:80] == [1.0] * 71
    assert at[90] == pytest.approx(0.5)
    assert at[99] == pytest.approx(0.05)
    cosine = wsd.model_copy(update={"schedule": "cosine", "min_learning_rate_ratio": 0.2})
    assert learning_rate(10, cosine) == pytest.approx(1.0)
    assert learning_rate(55, cosine) == pytest.approx(0.6)
    assert learning_rate(100, cosine) == pytest.approx(0.2)
    shares = [loss_share(step, wsd) for step in (0, 19, 20, 25, 30, 99)]
    assert shares == pytest.approx([0, 0, 0, 0.5, 1, 1])
    eager = wsd.model_copy(update={"ce_warmup_fraction": 0.0, "crossfade_fraction": 0.0})
    assert [loss_share(step, eager) for step in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("recipe", ["qwen3.6-27b.yaml", "debug.yaml"])
def test_the_plan_counts_the_drafters_parameters(recipe: str) -> None:
    config = load_config(Path(__file__).parent.parent / "configs" / recipe)
    with torch.device("meta"):
        drafter = Drafter(drafter_config(config))
    assert plan_train(config).num_parameters == sum(p.numel() for p in drafter.parameters())


def test_the_missions_plan_says_what_the_mission_costs() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys, runpy; sys.argv = ['plan', 'configs/qwen3.6-27b.yaml'];"
         "runpy.run_module('train.plan_page', run_name='__main__'); assert 'torch' not in sys.modules"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "1,730,213,120 parameters" in done.stdout
    assert "65.4 TB (this recipe)" in done.stdout
    assert "2.99 epochs" in done.stdout
    assert "[1, 16, 31, 46, 61] (as released drafters have them)" in done.stdout
    assert "7.6 GB a micro-batch if they existed" in done.stdout


def test_walk_anchors_are_in_the_hours() -> None:
    """A forward of a block a pass: less than the training of as many blocks, and none without them."""
    recipe = Path(__file__).parent.parent / "configs" / "qwen3.6-27b.yaml"
    plain, walk = (
        plan_train(load_config(recipe, [f"train.anchors={kind}"])) for kind in ("uniform", "walk")
    )
    assert plain.walk_flops == 0
    assert walk.step_flops == plain.step_flops
    assert walk.step_flops is not None
    assert 0 < walk.walk_flops < walk.step_flops / 2
    before, after = plain.hours(8), walk.hours(8)
    assert before is not None
    assert after == pytest.approx(before * (1 + walk.walk_flops / walk.step_flops))
    assert "more for walk starts" in "\n".join(walk.lines())
    assert "walk starts" not in "\n".join(plain.lines())


def test_wandb_without_a_key_stays_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    config = make_config(tmp_path, "train.wandb_project=tiny")
    tracker = Tracker(config, None, 0)
    tracker.log(1, {"train/loss": 2.5})
    tracker.finish()
    assert tracker.wandb_run_id
    assert list((config.run.folder / "logs" / "wandb").glob("offline-run-*"))
    line = json.loads((config.run.folder / "logs" / "train.jsonl").read_text())
    assert line == {"step": 1, "train/loss": 2.5}


def test_a_metric_without_a_unit_is_a_bug(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path), None, 0)
    tracker.log(1, {"validation/tree_acceptance_64": 2.0})
    with pytest.raises(AssertionError, match="train/accuracy"):
        tracker.log(1, {"train/accuracy": 1.0})


def test_lines_after_the_checkpoint_and_a_torn_one_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "trai')
    drop_lines_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_a_lost_machine_left_in_the_log_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"step": 1}\n\0\0\0\0\n\xff\xfe\n\n{"step": NaN}\n{"step": 2}\n{"st')
    drop_lines_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [f"line {n} is no record" in text for n, text in enumerate(caplog.messages, 2)] == [
        True
    ] * 4


def test_a_plan_counts_the_finished_corpus_own_training_rows(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shard = ShardEntry("shard-000000.parquet", 10, 1000, 400, "0" * 64)
    counts = {"total": {"read": 12, "done": {"train": 6, "validation": 1, "test": 3}}}
    plan = plan_train(config, CorpusManifest({}, [shard], counts))
    assert plan.num_samples == 6
