"""Features from shards, from a stream and from the trainer's own target: the same batches, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from stream_runs import ONE_RANK, extracting, make_run, ring_files

from common.distributed import Ranks
from configs.schema import Config
from data.features import open_features
from extract.run import run_extract
from train.batches import Batcher, MicroBatch
from train.open_source import await_features, open_supply, read_blocks

STEPS = 27  # of 5 samples, of 110 training rows: an epoch and a quarter
STREAM = ("train.source=stream", "train.stream_bytes=6000000")


def rank(number: int, world_size: int) -> Ranks:
    return Ranks(number, world_size, number, torch.device("cpu"))


def batches_of(config: Config, ranks: Ranks = ONE_RANK) -> Iterator[list[MicroBatch]]:
    """Of every step of the run, as the loop takes them."""
    await_features(config)
    features = open_features(config.features_location)
    supply = open_supply(config, features, read_blocks(config, features), ranks)
    batcher = Batcher(supply.source, supply.order, config.train, 4, 0, ranks.rank, ranks.world_size)
    samples = config.train.global_batch_samples
    supply.source.trained(0)
    for step in range(config.train.steps):
        yield batcher.load(step * samples)
        supply.source.trained((step + 1) * samples)
    supply.source.saved(config.train.steps * samples)


def assert_same(found: list[MicroBatch], wanted: list[MicroBatch]) -> None:
    assert [batch.sample_ids for batch in found] == [batch.sample_ids for batch in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.features.dtype == b.features.dtype
        for name in ("features", "anchor_tokens", "labels", "label_mask"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert vars(a.layout).keys() == vars(b.layout).keys()
        for name, tensor in vars(a.layout).items():
            assert torch.equal(tensor, vars(b.layout)[name]), name


@pytest.mark.parametrize("codec", ["bf16-planes", "fp8"])
def test_three_sources_give_the_same_batches(
    tiny_config: Callable[..., Config], codec: str
) -> None:
    changes = [f"train.steps={STEPS}", f"extract.codec={codec}", "extract.batch_tokens=512"]
    shards = make_run(tiny_config, *changes)
    run_extract(shards, ONE_RANK)
    wanted = list(batches_of(shards))
    seen = [sample_id for step in wanted for batch in step for sample_id in batch.sample_ids]
    assert len(set(seen[:110])) == 110
    assert any(len(batch.features) and not batch.label_mask.any() for s in wanted for batch in s)

    stream = make_run(tiny_config, *changes, *STREAM)
    with extracting(stream):
        found = list(batches_of(stream))
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)
    assert ring_files(stream) == []
    features = open_features(stream.features_location)
    assert {entry.split for entry in features.entries} == {"validation", "test"}

    online = make_run(tiny_config, *changes, "train.source=online")
    run_extract(online, ONE_RANK)
    for number in range(2):
        both = zip(
            batches_of(online, rank(number, 2)), batches_of(shards, rank(number, 2)), strict=True
        )
        for a, b in both:
            assert_same(a, b)


def test_too_many_bad_rows_stop_a_run_whose_features_are_computed_beside_it(
    tiny_config: Callable[..., Config],
) -> None:
    """Row 6 has an id that no target can read."""
    changes = [f"train.steps={STEPS}", "train.source=online", "extract.max_quarantined=0.0"]
    config = make_run(tiny_config, *changes)
    run_extract(config, ONE_RANK)
    with pytest.raises(ValueError, match="1 of 110 rows failed their checks"):
        list(batches_of(config))
