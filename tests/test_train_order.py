"""The order of samples, full or in windows: every row once an epoch, a function of the place, and what the ring should hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.features import RowEntry
from extract.stream_order import BlockSequence, SampleWindows
from extract.stream_ring import Cursor, cursor_at, wanted_blocks
from train.order import FullOrder, WindowOrder


def entries_of(rows_of_block: list[int]) -> list[list[RowEntry]]:
    number = itertools.count()
    return [
        [RowEntry(f"s{next(number)}", "x", "x", "train", 10, 5, f"block-{b}", r) for r in range(n)]
        for b, n in enumerate(rows_of_block)
    ]


def window_order(rows_of_block: list[int], window: int, seed: int = 0) -> WindowOrder:
    sequence = BlockSequence(len(rows_of_block), window, seed)
    return WindowOrder(entries_of(rows_of_block), SampleWindows(sequence, rows_of_block))


rows_of_blocks = st.lists(st.integers(1, 5), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(rows_of_blocks, st.integers(1, 4), st.integers(0, 40), st.integers(1, 30))
def test_every_row_once_an_epoch_and_any_part_of_the_sequence_is_the_same(
    rows_of_block: list[int], window: int, consumed: int, count: int
) -> None:
    order = window_order(rows_of_block, window)
    size = sum(rows_of_block)
    two_epochs = order.samples(0, 2 * size)
    for epoch in range(2):
        part = two_epochs[epoch * size : (epoch + 1) * size]
        assert {sample.epoch for sample in part} == {epoch}
        assert len({sample.entry.sample_id for sample in part}) == size
    one_by_one = [order.samples(n, 1)[0] for n in range(consumed, consumed + count)]
    assert order.samples(consumed, count) == one_by_one


@settings(deadline=None, max_examples=60)
@given(rows_of_blocks, st.integers(1, 4), st.integers(0, 60), st.integers(1, 12))
def test_a_batch_needs_only_the_blocks_of_its_windows(
    rows_of_block: list[int], window: int, consumed: int, count: int
) -> None:
    order = window_order(rows_of_block, window)
    windows, sequence = order.windows, order.windows.sequence
    positions = windows.positions(consumed, count)
    there = {f"block-{block}" for block in sequence.distinct_blocks(positions)}
    assert {sample.entry.shard for sample in order.samples(consumed, count)} <= there
    assert consumed in windows.samples_of(windows.window_of(consumed))
    assert positions.start == sequence.window_positions(windows.window_of(consumed)).start


def test_windows_mix_their_blocks_and_epochs_and_seeds_differ() -> None:
    order = window_order([5] * 8, 4)
    first = order.samples(0, 20)
    assert len({sample.entry.shard for sample in first}) == 4
    assert len({sample.entry.shard for sample in first[:5]}) > 1
    ids = [sample.entry.sample_id for sample in order.samples(0, 80)]
    assert ids[:40] != ids[40:]
    assert [s.entry.sample_id for s in window_order([5] * 8, 4, seed=1).samples(0, 80)] != ids


def test_every_window_has_a_shuffle_of_its_own() -> None:
    order = window_order([20], 1)  # each epoch is the same block alone
    epochs = [[s.entry.sample_id for s in order.samples(20 * epoch, 20)] for epoch in range(3)]
    assert len({tuple(ids) for ids in epochs}) == 3


def test_the_full_order_is_what_finished_runs_had() -> None:
    """Numbers of runs from before windows existed: they must continue with the same batches."""
    [entries] = entries_of([7])
    found = [int(sample.entry.sample_id[1:]) for sample in FullOrder(entries, 3).samples(0, 14)]
    assert found == [2, 4, 1, 0, 3, 5, 6, 2, 4, 3, 6, 0, 1, 5]


def wanted(cursor: Cursor, budget: int, num_blocks: int = 10, window: int = 2) -> list[int]:
    sequence = BlockSequence(num_blocks, window, 0)
    found = wanted_blocks(cursor, sequence, lambda _: 1, budget)
    order = [sequence.block_at(position) for position in range(2 * num_blocks)]
    return [order.index(block) for block in found]  # as positions of the first epoch


def test_the_ring_holds_what_comes_then_what_a_kill_would_need_then_what_is_later() -> None:
    cursor = Cursor("plan", saved=0, next=4, at_once=8, end=10)
    assert wanted(cursor, budget=100) == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9]
    assert wanted(cursor, budget=6) == [4, 5, 6, 7, 0, 1]
    assert wanted(cursor, budget=3) == [4, 5, 6]
    assert wanted(Cursor("plan", 10, 10, 10, 10), budget=100) == []


def test_a_later_epoch_wants_its_blocks_again_and_each_once() -> None:
    found = wanted(Cursor("plan", saved=8, next=8, at_once=12, end=20), budget=100)
    assert sorted(found) == list(range(10))  # positions of two epochs, each block once


@settings(deadline=None, max_examples=60)
@given(rows_of_blocks, st.integers(1, 4), st.integers(1, 9), st.integers(1, 12))
def test_the_cursor_never_passes_what_is_needed(
    rows_of_block: list[int], window: int, batch: int, steps: int
) -> None:
    order = window_order(rows_of_block, window)
    windows, sequence = order.windows, order.windows.sequence
    total, last = batch * steps, Cursor("plan", 0, 0, 0, 0)
    for trained in range(0, total, batch):
        cursor = cursor_at("plan", windows, (trained // 2 // batch) * batch, trained, batch, total)
        needed = {sample.entry.shard for sample in order.samples(trained, batch)}
        ahead = sequence.distinct_blocks(range(cursor.next, cursor.at_once))
        assert needed <= {f"block-{block}" for block in ahead}
        assert last.next <= cursor.next <= cursor.at_once <= cursor.end
        assert cursor.saved <= cursor.next
        assert not cursor.is_done
        last = cursor
    assert cursor_at("plan", windows, total, total, batch, total).is_done


@pytest.mark.parametrize("budget", [4, 5, 9])
def test_what_fits_is_never_more_than_the_budget(budget: int) -> None:
    sequence = BlockSequence(12, 2, 0)
    sizes = {block: 1 + block % 3 for block in range(12)}
    for start in range(0, 12, 2):
        cursor = Cursor("plan", max(0, start - 4), start, start + 2, 24)
        found = wanted_blocks(cursor, sequence, sizes.__getitem__, budget)
        assert sum(sizes[block] for block in found) <= budget
        assert len(set(found)) == len(found)
