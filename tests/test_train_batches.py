"""Batches: a function of the position alone; padding, cutting and sharing change nothing that is learned from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from train_runs import make_config

from configs.schema import Config, TrainSection
from data.features import RowEntry, open_features
from train.anchors import anchor_candidates
from train.batches import (
    Batcher,
    MicroBatch,
    cut_micro_batches,
    cut_packs,
    prefetched,
)
from train.order import FullOrder, Sample
from train.sources import ShardSource


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_config(tmp_path_factory.mktemp("batches"))


def entries(count: int) -> list[RowEntry]:
    return [
        RowEntry(f"s{i}", "x", "x", "train", 10 + (7 * i) % 23, 5, "shard", i) for i in range(count)
    ]


def batcher(config: Config, rank: int = 0, world_size: int = 1) -> Batcher:
    features = open_features(config.run.folder / "features")
    source, order = ShardSource(features), FullOrder(features.of_split("train"), 0)
    return Batcher(source, order, config.train, 5, 0, rank, world_size)


def test_every_epoch_is_a_permutation_and_batches_roll_over_its_end() -> None:
    rows = entries(7)
    sequence = [s for at in range(0, 21, 3) for s in FullOrder(rows, 0).samples(at, 3)]
    for epoch in range(3):
        part = sequence[7 * epoch : 7 * epoch + 7]
        assert {s.entry.sample_id for s in part} == {row.sample_id for row in rows}
        assert {s.epoch for s in part} == {epoch}
    orders = [[s.entry.sample_id for s in sequence[7 * e : 7 * e + 7]] for e in range(3)]
    assert orders[0] != orders[1]


def test_any_batch_size_continues_the_same_sequence() -> None:
    rows = entries(9)
    one_by_one = [FullOrder(rows, 3).samples(at, 1)[0] for at in range(30)]
    assert FullOrder(rows, 3).samples(5, 25) == one_by_one[5:30]


def test_micro_batches_hold_the_batch_and_waste_little() -> None:
    samples = FullOrder(entries(40), 0).samples(0, 24)
    cut = cut_micro_batches(samples, 4, max_tokens=25)
    assert Counter(s for part in cut for s in part) == Counter(samples)
    lengths = [[min(s.entry.num_tokens, 25) for s in part] for part in cut]
    assert [n for part in lengths for n in part] == sorted(
        (n for part in lengths for n in part), reverse=True
    )


def blocks(batches: list[MicroBatch]) -> Counter[tuple[object, ...]]:
    """Everything a block is learned from, padding and packing stripped: context, anchor, labels."""
    found: Counter[tuple[object, ...]] = Counter()
    for batch in batches:
        for row in range(batch.anchor_tokens.shape[0]):
            for n in range(batch.anchor_tokens.shape[1]):
                mask = batch.label_mask[row, n]
                if not mask.any():
                    continue
                document = int(batch.layout.anchor_documents[row, n])
                position = int(batch.layout.anchor_positions[row, n])
                own = (batch.layout.context_documents[row] == document).nonzero().flatten()
                places = batch.layout.context_positions[row, own]
                assert places[:position].tolist() == list(range(position))
                context = batch.features[row, own[:position]]
                found[
                    batch.sample_ids[row + document],
                    position,
                    int(batch.anchor_tokens[row, n]),
                    tuple(batch.labels[row, n][mask].tolist()),
                    context.sum().item(),
                ] += 1
    return found


@pytest.mark.parametrize(
    ("world_size", "micro_batch_samples"), [(1, 4), (2, 1), (2, 2), (3, 1), (4, 2), (5, 4)]
)
def test_ranks_and_micro_batches_share_the_same_blocks(
    config: Config, world_size: int, micro_batch_samples: int
) -> None:
    whole = blocks(batcher(config).load(12))
    other = config.model_copy(
        update={
            "train": config.train.model_copy(update={"micro_batch_samples": micro_batch_samples})
        }
    )
    shared = [batcher(other, rank, world_size).load(12) for rank in range(world_size)]
    assert len({len(part) for part in shared}) == 1  # ranks reduce together, so none may have fewer
    assert sum((blocks(part) for part in shared), Counter()) == whole


def packed(config: Config, tokens: int, num_blocks: int, **changes: int) -> Config:
    update = {"pack_tokens": tokens, "pack_blocks": num_blocks, **changes}
    return config.model_copy(update={"train": config.train.model_copy(update=update)})


@pytest.mark.parametrize(
    ("world_size", "tokens", "num_blocks"), [(1, 40, 6), (1, 90, 13), (2, 90, 13), (3, 200, 50)]
)
def test_packs_hold_the_same_blocks_in_constant_shapes(
    config: Config, world_size: int, tokens: int, num_blocks: int
) -> None:
    whole = blocks(batcher(config).load(12))
    other = packed(config, tokens, num_blocks)
    shared = [batcher(other, rank, world_size).load(12) for rank in range(world_size)]
    assert len({len(part) for part in shared}) == 1
    assert sum((blocks(part) for part in shared), Counter()) == whole
    for batch in (batch for part in shared for batch in part):
        assert batch.features.shape[:2] == (1, tokens)
        assert batch.anchor_tokens.shape == (1, num_blocks)
    if tokens == 200:
        assert [len(batch.sample_ids) for batch in shared[0]] == [4]  # the global batch, one pack


def test_a_pack_is_full_in_tokens_or_in_blocks() -> None:
    """First fit: no document of a later pack would have fitted into an earlier one."""
    rows = [replace(row, num_response_tokens=4 + i % 5) for i, row in enumerate(entries(40))]
    train = TrainSection(steps=1, max_tokens=30, num_anchors=7, pack_tokens=64, pack_blocks=20)
    samples = FullOrder(rows, 0).samples(0, 40)
    packs = cut_packs(samples, train)
    assert Counter(s for part in packs for s in part) == Counter(samples)

    def size(sample: Sample) -> tuple[int, int]:
        return min(sample.entry.num_tokens, 30), min(sample.entry.num_response_tokens, 7)

    for index, part in enumerate(packs):
        tokens, num_blocks = map(sum, zip(*map(size, part), strict=True))
        assert tokens <= 64
        assert num_blocks <= 20
        for sample in (s for later in packs[index + 1 :] for s in later):
            more = size(sample)
            assert tokens + more[0] > 64 or num_blocks + more[1] > 20


def test_walk_starts_come_first_up_to_their_share(config: Config) -> None:
    changes = {"anchors": "walk", "walk_share": 0.5, "num_anchors": 6}
    other = config.model_copy(update={"train": config.train.model_copy(update=changes)})
    plain, features = batcher(other), open_features(config.features_location)
    starts = {
        entry.sample_id: anchor_candidates(features.read(entry).loss_mask)[::4].tolist()
        for entry in features.of_split("train")
    }
    drawn = replace(plain, walk_starts=starts)
    for batch in drawn.load(0):
        at_starts = 0
        for row, sample_id in enumerate(batch.sample_ids):
            live = batch.label_mask[row].any(-1)
            positions = batch.layout.anchor_positions[row][live].tolist()
            found = len(set(positions) & set(starts[sample_id]))
            assert found >= min(3, len(starts[sample_id]))
            at_starts += found
        assert batch.num_at_starts == at_starts
    assert blocks(drawn.load(0)) != blocks(plain.load(0))


def test_a_document_longer_than_max_tokens_is_cut_there(config: Config) -> None:
    short = config.model_copy(
        update={"train": config.train.model_copy(update={"max_tokens": 12, "num_anchors": 99})}
    )
    for batch in batcher(short).load(0):
        live = batch.label_mask.any(-1)
        last = batch.layout.anchor_positions[live] + batch.label_mask[live].sum(-1)
        assert int(last.max()) <= 11
        assert batch.num_tokens <= 12 * len(batch.sample_ids)


def test_prefetching_keeps_the_order_and_hands_errors_on() -> None:
    def load(position: int) -> list[MicroBatch]:
        time.sleep(0.01)
        if position == 3:
            raise ValueError("shard 3 is cut short")
        return [position]  # pyright: ignore[reportReturnType]  # order is all that matters here

    assert list(prefetched(load, iter([0, 1, 2]), 1)) == [[0], [1], [2]]
    stream: Iterator[list[MicroBatch]] = prefetched(load, iter(range(9)), 1)
    assert [next(stream) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="shard 3"):
        next(stream)


def test_labels_never_leave_the_documents_tokens(config: Config) -> None:
    reader, features = batcher(config), open_features(config.features_location)
    rows = {e.sample_id: features.read(e).input_ids for e in features.of_split("train")}
    for batch in reader.load(0):
        for row, sample_id in enumerate(batch.sample_ids):
            for n in batch.label_mask[row].any(-1).nonzero().flatten().tolist():
                position = int(batch.layout.anchor_positions[row, n])
                labels = batch.labels[row, n][batch.label_mask[row, n]]
                assert torch.equal(
                    labels, rows[sample_id][position + 1 : position + 1 + len(labels)]
                )
