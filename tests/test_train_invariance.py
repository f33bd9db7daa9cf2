"""The gradient of a global batch does not depend on how it is cut: micro-batches, packs or ranks, for every loss.

In float64, where a wrong normaliser, a lost block or a block counted twice cannot hide behind rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from train_runs import make_config

from configs.schema import LOSS_NAMES, Config, TrainSection
from data.features import open_features
from drafter.model import Drafter, block_embeddings
from target.head import load_target_head
from train.batches import Batcher, MicroBatch
from train.initialise import initial_drafter
from train.losses import LossMix
from train.objective import micro_batch_loss
from train.order import FullOrder
from train.schedule import LossPhase
from train.sources import ShardSource

CUTS: dict[str, tuple[int, dict[str, int]]] = {
    "whole": (1, {"micro_batch_samples": 4}),
    "one by one": (1, {"micro_batch_samples": 1}),
    "two ranks": (2, {"micro_batch_samples": 1}),
    "three ranks, uneven": (3, {"micro_batch_samples": 2}),
    "packs": (1, {"pack_tokens": 90, "pack_blocks": 13}),
    "packs on two ranks": (2, {"pack_tokens": 60, "pack_blocks": 8}),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_config(tmp_path_factory.mktemp("invariance"), "extract.soft_labels=4")


def batches_of(config: Config, world_size: int, changes: dict[str, int]) -> list[MicroBatch]:
    """What all ranks together run in one step."""
    train = TrainSection.model_validate(config.train.model_dump() | changes)
    features = open_features(config.run.folder / "features")
    source, order = ShardSource(features), FullOrder(features.of_split("train"), 0)
    return [
        batch
        for rank in range(world_size)
        for batch in Batcher(source, order, train, 5, 0, rank, world_size).load(8)
    ]


def gradient(
    config: Config, drafter: Drafter, batches: Sequence[MicroBatch], mix: LossMix
) -> Tensor:
    path = config.run.folder / "features" / "target_head.safetensors"
    head = load_target_head(path, "cpu", torch.float64)
    drafter.zero_grad()
    normaliser = float(sum(batch.num_slots for batch in batches))
    for batch in batches:
        blocks = block_embeddings(head.embedding, batch.anchor_tokens, 47, 5)
        hidden = drafter(batch.features, blocks, batch.layout)
        phase = LossPhase(0.9, 1.0)
        micro_batch_loss(hidden, head.head, batch, mix, phase, normaliser, 7)[0].backward()
    return torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("soft_share", [0.0, 0.5])
def test_the_gradient_is_that_of_the_whole_batch_however_it_is_cut(
    config: Config, name: str, soft_share: float
) -> None:
    drafter = initial_drafter(config).double()
    with (
        torch.no_grad()
    ):  # far from uniform, so that trees, argmaxes and weights differ from block to block
        for parameter in drafter.parameters():
            parameter.mul_(3)
    mix = LossMix({name: 1.0, "ce": 0.1}, 4.0, soft_share, 0.5, 8, 1.5, (4, 8))  # pyright: ignore[reportArgumentType]  # a name
    found = {
        cut: gradient(config, drafter, batches_of(config, ranks, changes), mix)
        for cut, (ranks, changes) in CUTS.items()
    }
    whole = found["whole"]
    assert whole.norm() > 1e-3
    for cut, other in found.items():
        assert (other - whole).norm() <= 1e-6 * whole.norm(), cut
