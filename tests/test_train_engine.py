"""What the engine and the stepper promise apart from a whole run: exact gradients, the normaliser, the watch for NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import ONE_RANK, TAPS, make_config

from configs.schema import Config
from data.features import open_features
from drafter.config import drafter_config
from drafter.masks import BlockLayout
from drafter.model import Drafter
from target.head import load_target_head
from train.batches import Batcher, MicroBatch
from train.engine import Engine, join_process_group
from train.initialise import initial_drafter
from train.losses import ce_weights
from train.order import FullOrder
from train.sources import ShardSource
from train.step import Stepper
from train.stop import StopRequest
from train.vocabulary import TrainingHead


@pytest.fixture(autouse=True)
def _process_group() -> None:
    join_process_group(ONE_RANK)


def inputs(config: Config) -> tuple[torch.Tensor, torch.Tensor, BlockLayout]:
    generator = torch.Generator().manual_seed(0)
    hidden = config.target.hidden_size
    features = torch.randn(1, 3, len(TAPS), hidden, generator=generator)
    embeddings = torch.randn(1, 1, config.drafter.block_size, hidden, generator=generator)
    place = torch.arange(3)[None]
    return features, embeddings, BlockLayout(place, place * 0, place[:, :1] + 3, place[:, :1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulated_gradients_are_the_sum_not_the_mean(tmp_path: Path, stage: int) -> None:
    config = make_config(tmp_path, f"train.zero_stage={stage}", "train.max_grad_norm=1e9")
    plain = initial_drafter(config)
    (2.0 * plain(*inputs(config)).square().sum()).backward()
    wanted = torch.nn.utils.get_total_norm(
        [p.grad for p in plain.parameters() if p.grad is not None]
    )
    engine = Engine(initial_drafter(config), config.train, ONE_RANK, 2)
    for last in (False, True):
        engine.backward(engine.forward(*inputs(config)).square().sum(), last)
    assert engine.step(1e-3) == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_is_noticed_though_the_loss_is(
    tmp_path: Path, stage: int
) -> None:
    config = make_config(tmp_path, f"train.zero_stage={stage}")
    engine = Engine(initial_drafter(config), config.train, ONE_RANK, 2)
    engine.backward(engine.forward(*inputs(config)).square().sum(), last=False)
    assert engine.take_not_finite() == 0
    loss = (engine.forward(*inputs(config)).sum() * 0).sqrt()  # 0, and its derivative 0 * infinity
    assert loss == 0
    engine.backward(loss, last=True)
    assert engine.take_not_finite() == 1
    assert engine.take_not_finite() == 0


def test_the_optimizer_is_adamw_from_its_first_step(tmp_path: Path) -> None:
    """ZeRO 0 in bf16 takes a step of its own while it is built: it must not count."""
    config = make_config(tmp_path, "train.zero_stage=0", "train.dtype=bfloat16")
    engine = Engine(initial_drafter(config), config.train, ONE_RANK, 1)
    features, embeddings, layout = inputs(config)
    engine.backward(
        engine.forward(features.bfloat16(), embeddings.bfloat16(), layout).float().sum(), last=True
    )
    engine.step(1e-3)
    assert {float(state["step"]) for state in engine.optimizer.state.values()} == {1.0}


def first_batches(config: Config) -> list[MicroBatch]:
    features = open_features(config.run.folder / "features")
    order = FullOrder(features.of_split("train"), 0)
    return Batcher(ShardSource(features), order, config.train, 5, 0, 0, 1).load(0)


def test_the_normaliser_counts_slots_and_knows_the_first_steps_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    head = load_target_head(
        config.run.folder / "features" / "target_head.safetensors", "cpu", torch.float32
    )
    engine = Engine(Drafter(drafter_config(config)), config.train, ONE_RANK, 4)
    stepper = Stepper(config, engine, head.embedding, TrainingHead(head.head), StopRequest())
    batches = first_batches(config)
    slots = sum(int(batch.label_mask.sum()) for batch in batches)
    decayed = sum(
        float(ce_weights(row[None], 4.0).sum())
        for batch in batches
        for row in batch.label_mask.flatten(0, 1)
    )
    assert stepper.normaliser(batches, None) == pytest.approx(decayed, rel=1e-6)
    assert stepper.normaliser(batches, 0.25) == pytest.approx(0.25 * slots)
    outcome = stepper.accumulate(batches, 0, None)
    assert outcome.sums.slots == slots
    assert outcome.sums.weight == pytest.approx(decayed, rel=1e-6)
    with pytest.raises(ValueError, match=r"train\.max_tokens=40"):
        stepper.normaliser([batch.without_labels() for batch in batches], None)
