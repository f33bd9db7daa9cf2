"""The ring: never more than its budget, always what the trainer needs, nothing at the end, whoever returns from where."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from s3_server import BUCKET, s3_server
from stream_runs import extracting, make_run, ring_files

import common.waiting
from configs.schema import Config
from data.corpus import CorpusRow
from data.feature_shards import FeatureRow
from extract.claims import Claims
from extract.slices import Extracted
from extract.stream import Stream, StreamWorker, open_stream
from extract.stream_plan import block_entries, plan_stream
from extract.work import plan_work
from train.open_source import Blocks
from train.sources import SourceClosed
from train.sources_stream import StreamSource

BUDGET = 3_500_000
STREAM = (
    "train.source=stream",
    "train.shuffle_window=1",  # so that the budget holds three of the four blocks, and a step needs two
    f"train.stream_bytes={BUDGET}",
    "train.steps=60",
)


@pytest.fixture
def config(tiny_config: Callable[..., Config]) -> Config:
    return make_run(tiny_config, *STREAM)


@pytest.fixture
def stream(config: Config) -> Stream:
    return open_stream(config, plan_work(config))


@pytest.fixture
def worker(stream: Stream) -> Iterator[StreamWorker]:
    with Claims(stream.ring.storage, 60.0, prefix="stream/claims/") as claims:
        yield StreamWorker(stream, claims)


def source_of(stream: Stream, is_main: bool = True) -> StreamSource:
    return StreamSource(
        stream.plan, stream.ring, Blocks(stream.plan, block_entries(stream.plan)).order, is_main
    )


def made_up(row: CorpusRow) -> FeatureRow:
    """No target: features that name the row."""
    features = torch.full((row.num_tokens, 3, 64), float(row.sample_id.removeprefix("sample-")))
    ids, mask = torch.tensor(row.input_ids, dtype=torch.int64), torch.tensor(row.loss_mask)
    return FeatureRow(row.sample_id, row.source, row.task, row.split, ids, mask, features)


def fill(worker: StreamWorker) -> int:
    """Make all blocks that are wanted now; gives how many, and holds the ring to its budget throughout."""
    made = 0
    while (block := worker.take()) is not None:
        cut = worker.plan.cuts[block]
        rows = worker.plan.rows.read(cut.start, cut.stop)
        worker.store(Extracted(block, [made_up(row) for row in rows], []))
        made += 1
        folder = Path(worker.ring.storage.url) / "stream"
        assert sum(path.stat().st_size for path in folder.glob("block*.parquet")) <= BUDGET
    return made


def test_every_step_finds_its_blocks_within_the_budget_and_nothing_is_left(
    config: Config, stream: Stream, worker: StreamWorker
) -> None:
    source, made = source_of(stream), 0
    source.trained(0)
    for step in range(config.train.steps):
        made += fill(worker)
        for sample in source.order.samples(step * 5, 5):
            assert stream.ring.read_record(int(sample.entry.shard[-16:-8])) is not None
        source.prepare(step * 5, lambda _: [])  # would wait for ever
        entry = source.order.samples(step * 5, 1)[0].entry
        out = torch.zeros(1, 3, 64)
        source.read(entry).features_into(out)
        assert out.flatten()[0] == float(entry.sample_id.removeprefix("sample-"))
        source.trained((step + 1) * 5)
        if step % 7 == 6:
            source.saved((step + 1) * 5)
    assert made > len(stream.plan.cuts)  # of later epochs again
    assert not stream.is_trained()
    source.saved(config.train.steps * 5)
    assert ring_files(config) == []
    assert stream.is_trained()
    assert list(worker.take_all()) == []


def test_a_trainer_that_goes_back_gets_what_was_released(
    stream: Stream, worker: StreamWorker
) -> None:
    source = source_of(stream)
    source.trained(0)
    for step in range(25):  # past the first epoch of 110 rows, never saved
        fill(worker)
        source.trained((step + 1) * 5)
    fill(worker)
    again = source_of(stream)
    again.trained(10)  # its checkpoint
    fill(worker)
    again.prepare(10, lambda _: [])
    cursor = stream.ring.read_cursor()
    assert cursor is not None
    assert (cursor.saved, cursor.next) == (0, 0)


def test_a_worker_that_died_half_way_hinders_nobody(stream: Stream, worker: StreamWorker) -> None:
    """A block without its record, and a record without its block."""
    fill(worker)
    first, second = sorted(stream.ring.present())[:2]
    for name in (f"stream/block-{first:08d}.json", f"stream/block-{second:08d}.parquet"):
        stream.ring.storage.delete(name)
    assert not {first, second} & set(stream.ring.present())
    fill(worker)
    assert {first, second} <= set(stream.ring.present())


def test_the_trainer_says_what_it_waits_for_and_can_be_stopped(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(common.waiting, "FIRST_LINE_S", 0.0)
    source, failures = source_of(stream), []

    def prepare() -> None:
        try:
            source.prepare(0, lambda _: [])
        except SourceClosed as closed:
            failures.append(closed)

    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=prepare)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        source.close()
        thread.join(5)
    assert len(failures) == 1
    assert "stream/block-0000" in caplog.text
    assert "start `./launch.sh extract` with this recipe" in caplog.text


def test_only_the_main_rank_writes_the_cursor(stream: Stream) -> None:
    source_of(stream, is_main=False).trained(0)
    assert stream.ring.read_cursor() is None


def test_a_ring_that_a_step_does_not_fit_is_refused_with_what_would(config: Config) -> None:
    def with_bytes(number: int) -> Config:
        train = config.train.model_copy(update={"stream_bytes": number})
        return config.model_copy(update={"train": train})

    with pytest.raises(
        ValueError, match=r"train.stream_bytes=2000000 .*raise it to (\d+)"
    ) as error:
        open_stream(with_bytes(2_000_000), plan_work(config))
    least = int(str(error.value).partition("raise it to ")[2].partition(",")[0])
    open_stream(with_bytes(least), plan_work(config))
    with pytest.raises(ValueError, match="raise it to"):
        open_stream(with_bytes(least - 1), plan_work(config))


def test_a_trainer_of_another_recipe_is_refused(config: Config, stream: Stream) -> None:
    source_of(stream).trained(0)
    train = config.train.model_copy(update={"shuffle_window": 2, "stream_bytes": 10**7})
    other = config.model_copy(update={"train": train})
    with pytest.raises(ValueError, match=r"was made with stream=.*, this run has .*; remove its"):
        open_stream(other, plan_work(other))


def test_a_block_that_goes_while_it_is_read_is_waited_for(
    tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with an older cursor made room; in a bucket an open object does not outlive that."""
    with s3_server() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        config = make_run(tiny_config, *STREAM, f"extract.folder=s3://{BUCKET}/run")
        stream = open_stream(config, plan_work(config))
        entry = source_of(stream).order.samples(0, 1)[0].entry
        block = int(entry.shard[-16:-8])
        cut = stream.plan.cuts[block]
        rows = [made_up(row) for row in stream.plan.rows.read(cut.start, cut.stop)]
        with Claims(stream.ring.storage, 60.0, prefix="stream/claims/") as claims:
            worker = StreamWorker(stream, claims)
            worker.store(Extracted(block, rows, []))
            source = source_of(stream)
            source._await(entry.shard, "0 of 1")
            stream.ring.keep_only([])
            later = threading.Timer(0.3, lambda: worker.store(Extracted(block, rows, [])))
            later.start()
            assert source.read(entry).sample_id == entry.sample_id
            later.join()


@pytest.mark.timeout(60)
def test_a_worker_whose_last_block_fails_stops_instead_of_waiting_for_room(
    tiny_config: Callable[..., Config],
) -> None:
    one_block = ("extract.shard_bytes=100_000_000", "train.stream_bytes=100_000_000")
    config = make_run(tiny_config, *STREAM, *one_block, "extract.max_quarantined=0.0")
    with pytest.raises(ValueError, match="1 of 110 rows failed their checks"), extracting(config):
        pass


@pytest.mark.parametrize("key", ["extract.codec=fp8", "extract.shard_bytes=2_000_000"])
def test_a_trainer_that_cuts_or_reads_blocks_in_another_way_is_refused(
    tiny_config: Callable[..., Config], stream: Stream, key: str
) -> None:
    """Its rows would be looked for in blocks without them, and pass for rows that failed their checks."""
    settings = plan_work(stream.plan.config).settings
    other = stream.plan.config.model_copy(
        update={"extract": make_run(tiny_config, *STREAM, key).extract}
    )
    with pytest.raises(ValueError, match=f"was made with {key.partition('=')[0]}=.*set it back"):
        plan_stream(other, settings)


def test_blocks_of_another_recipe_are_removed_not_waited_for(
    stream: Stream, worker: StreamWorker
) -> None:
    fill(worker)
    for block in stream.ring.present():
        record = stream.ring.read_record(block)
        assert record is not None
        stream.ring.write_record(block, replace(record, plan="another seed's"))
    with Claims(stream.ring.storage, 60.0, prefix="stream/claims/") as claims:
        fill(StreamWorker(stream, claims))
    source = source_of(stream)
    source.trained(0)
    source.prepare(0, lambda _: [])  # would wait for ever


def test_a_second_run_on_one_stream_is_refused_until_the_first_has_ended(stream: Stream) -> None:
    """Same corpus, recipe and seed but for the learning rate, say, so that the blocks are the same."""
    first = source_of(stream)
    first.trained(0)
    run = stream.plan.config.run.model_copy(update={"output_dir": Path("elsewhere")})
    config = stream.plan.config.model_copy(update={"run": run})
    second = replace(stream, plan=replace(stream.plan, config=config))
    with pytest.raises(ValueError, match=r"belongs to the run in .*, which has not ended"):
        source_of(second).require_free()
    first.saved(stream.plan.total)
    source_of(second).require_free()


def test_a_waiting_trainer_writes_its_cursor_again_if_it_is_gone(stream: Stream) -> None:
    source = source_of(stream)
    source.trained(40)
    wanted = stream.ring.read_cursor()
    stream.ring.storage.delete("stream/cursor.json")
    timer = threading.Timer(0.5, source.close)
    timer.start()
    with pytest.raises(SourceClosed):
        source.prepare(40, lambda _: [])
    timer.join()
    assert stream.ring.read_cursor() == wanted is not None


def test_a_recipe_with_more_steps_finds_its_stream_not_ended(
    stream: Stream, worker: StreamWorker
) -> None:
    """The extracting side may be the first to be started with them."""
    source_of(stream).trained(stream.plan.total)
    assert stream.is_trained()
    train = stream.plan.config.train.model_copy(update={"steps": 61})
    config = stream.plan.config.model_copy(update={"train": train})
    longer = replace(stream, plan=replace(stream.plan, config=config))
    assert not longer.is_trained()
    line = StreamWorker(longer, worker.claims)._describe()
    assert (
        "has ended after 300 samples, this recipe trains on 305: start `./launch.sh train`" in line
    )


@pytest.mark.parametrize("name", ["cursor.json", "block-00000000.json"])
def test_a_damaged_file_of_the_ring_is_named_with_its_remedy(stream: Stream, name: str) -> None:
    read = stream.ring.read_cursor if "cursor" in name else lambda: stream.ring.read_record(0)
    for data in (b"", b'{"plan": 1}', b"[]"):
        stream.ring.storage.write(f"stream/{name}", data)
        with pytest.raises(ValueError, match=rf"stream/{name} .*; delete it, `./launch.sh"):
            read()
