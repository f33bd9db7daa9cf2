"""The plan's memory: formulas against numbers by hand and against what an engine holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import ONE_RANK, make_config, make_recipe

from configs.load import load_config
from configs.schema import Config
from drafter.masks import BlockLayout
from train.engine import Engine, join_process_group
from train.initialise import initial_drafter
from train.memory import CARDS, Sharding, TrainMemory

MISSION = Path(__file__).parent.parent / "configs" / "qwen3.6-27b.yaml"


def test_state_of_every_zero_stage_by_hand(tmp_path: Path) -> None:
    memory = TrainMemory(make_config(tmp_path, "train.dtype=bfloat16"))
    size = memory.num_parameters
    assert memory.state_bytes(Sharding(0), 8) == size * (2 + 2 + 12)
    assert memory.state_bytes(Sharding(1), 8) == size * (2 + 6 + 12 / 8)
    assert memory.state_bytes(Sharding(3), 8) == size * (2 / 8 + 4 / 8 + 2 + 12 / 8)
    assert memory.state_bytes(Sharding(1, "optimizer"), 8) == size * (2 + 2)
    assert memory.host_bytes(Sharding(1, "optimizer")) == size * (4 + 8 + 4 + 2)
    assert memory.host_bytes(Sharding(3, "all")) == size * (4 + 8 + 4 + 2 + 2)
    assert memory.host_bytes(Sharding(3)) == 0


def frozen_recipe(tmp_path: Path, *more: str) -> Config:
    freeze = ["train.init_from=somewhere", "train.freeze=[layers.0, fc]"]
    return load_config(make_recipe(tmp_path), [*freeze, *more])


def test_frozen_parts_cost_their_weights_only(tmp_path: Path) -> None:
    memory = TrainMemory(frozen_recipe(tmp_path, "train.dtype=bfloat16"))
    assert 0 < memory.num_trained < memory.num_parameters
    frozen = memory.num_parameters - memory.num_trained
    assert memory.state_bytes(Sharding(0), 1) == memory.num_trained * 16 + frozen * 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (1, "bfloat16")])
def test_moments_and_masters_are_what_an_engine_holds(
    tmp_path: Path, stage: int, dtype: str, optimizer: str
) -> None:
    join_process_group(ONE_RANK)
    settings = [f"train.zero_stage={stage}", f"train.dtype={dtype}", f"train.optimizer={optimizer}"]
    config = make_config(tmp_path, *settings)
    engine = Engine(initial_drafter(config), config.train, ONE_RANK, 1)
    hidden, block = config.target.hidden_size, config.drafter.block_size
    place = torch.zeros(1, 1, dtype=torch.int64)
    features = torch.ones(1, 1, 2, hidden, dtype=engine.dtype)
    blocks = torch.ones(1, 1, block, hidden, dtype=engine.dtype)
    out = engine.forward(features, blocks, BlockLayout(place, place, place + 1, place))
    engine.backward(out.float().square().sum(), last=True)
    engine.step(1e-3)
    held = {
        key: sum(
            s[key].numel() * s[key].element_size()
            for s in engine.optimizer.state.values()
            if key in s
        )
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
    }
    memory = TrainMemory(config)
    # flat buffers are padded to whole cache lines
    assert memory.moment_bytes <= sum(held.values()) <= memory.moment_bytes + 4096
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert memory.num_trained <= sum(p.numel() for p in masters) <= memory.num_trained + 1024


def test_what_fits_follows_cards_and_numbers(tmp_path: Path) -> None:
    big = [
        "train.head_chunk_rows=1024",
        "train.pack_blocks=4096",
        "train.activation_checkpointing=false",
    ]
    memory = TrainMemory(load_config(MISSION, big))
    assert memory.gpu_bytes(Sharding(1), 8) < memory.gpu_bytes(Sharding(1), 1)
    for sharding in (Sharding(0), Sharding(1), Sharding(3, "all")):
        for count in (1, 8):
            needed = memory.gpu_bytes(sharding, count)
            for card in CARDS.values():
                assert memory.fits(sharding, count, card) == (needed + 2e9 <= 0.9 * card)
    lines = "\n".join(TrainMemory(load_config(MISSION)).table())
    assert "80 GB" in lines
    assert "H200" in lines
    assert lines.count("<- this recipe") == 1
    muon = list(TrainMemory(load_config(MISSION, ["train.optimizer=muon"])).table())
    assert [line.split()[0] for line in muon[1:]] == ["0", "1"]  # the stages that Muon has
