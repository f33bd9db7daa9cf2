"""Stages side by side: bounded, in order, and a failing one ends them all with its own words."""

import threading
import time

import pytest

from extract.pipeline import Pipeline, Stage


def test_every_item_goes_through_every_stage_in_order():
    found = []
    stages = [
        Stage("double", lambda x: 2 * x),
        Stage("keep even halves", lambda x: x if x % 4 == 0 else None, depth=3),
        Stage("note", found.append),
    ]
    with Pipeline(stages) as pipeline:
        for item in range(1, 101):
            pipeline.put(item)
    assert found == [2 * item for item in range(1, 101) if item % 2 == 0]


def test_several_threads_do_each_item_once():
    found = []
    with Pipeline([Stage("note", found.append, num_threads=4, depth=2)]) as pipeline:
        for item in range(500):
            pipeline.put(item)
    assert sorted(found) == list(range(500))


def test_nothing_runs_ahead_of_a_slow_stage():
    go, started = threading.Event(), []

    def slow(item):
        started.append(item)
        go.wait()

    taken = []

    def feed(pipeline):
        for item in range(20):
            pipeline.put(item)
            taken.append(item)

    with Pipeline([Stage("pass", lambda x: x, depth=1), Stage("slow", slow, depth=2)]) as pipeline:
        feeder = threading.Thread(target=feed, args=(pipeline,))
        feeder.start()
        time.sleep(0.2)
        # one in `slow`, two before it, one that `pass` cannot hand on, one before `pass`
        assert (len(started), len(taken)) == (1, 5)
        go.set()
        feeder.join()
    assert started == list(range(20))


@pytest.mark.parametrize("failing", ["first", "second", "last"])
def test_a_failing_stage_stops_all_with_its_own_message(failing):
    def stage(name):
        def run(item):
            if name == failing and item == 7:
                raise OSError(28, f"no space in {name}")
            return item if name != "last" else None

        return Stage(name, run)

    def feed():
        with Pipeline([stage("first"), stage("second"), stage("last")]) as pipeline:
            for item in range(10_000):  # far more than could be waiting
                pipeline.put(item)

    with pytest.raises(OSError, match=f"no space in {failing}"):
        feed()
    assert threading.active_count() < 10


def test_a_failure_after_the_last_item_is_not_lost():
    def fail(item):
        time.sleep(0.05)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 1"), Pipeline([Stage("fail", fail)]) as pipeline:
        pipeline.put(1)


def test_a_failing_caller_drops_what_waits():
    go, done = threading.Event(), []

    def slow(item):
        go.wait(10)
        done.append(item)

    def feed():
        with Pipeline([Stage("slow", slow, depth=5)]) as pipeline:
            for item in range(5):
                pipeline.put(item)
            threading.Timer(0.1, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        feed()
    assert len(done) <= 1  # its present item
