"""Claims on a shared folder: one holder, the dead found out by nobody's clock but one's own, and given up at once."""

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

import common.waiting
from common.storage import LocalStorage
from extract.claims import STALL_LEASES, Claims, clear_claims, workers

LEASE_S = 40.0


class Clock:
    """Seconds of one worker; each test's workers have clocks that never agree."""

    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def make_claims(storage, now=0.0):
    clock = Clock(now)
    return Claims(storage, LEASE_S, clock), clock


def test_of_many_takers_one_gets_it(storage):
    takers = [make_claims(storage)[0] for _ in range(8)]
    got, together = [], threading.Barrier(8)

    def take(claims):
        together.wait()
        got.append(claims.take("shard-000000"))

    threads = [threading.Thread(target=take, args=(claims,)) for claims in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]
    assert sum(claims.holds("shard-000000") for claims in takers) == 1
    assert len(workers(storage)) == 1


def test_a_claim_that_is_kept_fresh_is_never_taken_over(storage):
    holder, _ = make_claims(storage, now=1e6)
    other, clock = make_claims(storage)
    assert holder.take("a")
    for _ in range(20):
        assert not other.take("a")
        clock.now += LEASE_S - 1  # however long in all: it has changed in between
        holder.beat()
    assert holder.holds("a")


def test_a_silent_claim_is_taken_over_after_a_lease_of_the_watchers_own_clock(storage):
    holder, holders_clock = make_claims(storage, now=1e6)
    other, clock = make_claims(storage)
    assert holder.take("a")
    holders_clock.now += 1e9  # says nothing: no two clocks are compared
    assert not other.take("a")  # seen for the first time
    clock.now += LEASE_S - 1
    assert not other.take("a")
    clock.now += 1
    assert other.take("a")
    holder.beat()  # it wakes up
    assert not holder.holds("a")
    holder.give_up("a")  # and leaves the other's claim alone
    assert json.loads(storage.read("claims/a.json"))["worker"] == other.worker


def test_what_is_given_up_is_free_at_once(storage):
    holder, _ = make_claims(storage)
    other, _ = make_claims(storage)
    with holder:
        assert holder.take("a")
        assert holder.take("b")
        assert not other.take("a")
        holder.give_up("a")
        assert other.take("a")
        assert not other.take("b")
    assert other.take("b")  # the context has ended


def test_a_killed_process_of_this_machine_is_known_at_once(storage, tmp_path):
    code = (
        "import os, signal, sys; from common.storage import LocalStorage; from pathlib import Path;"
        "from extract.claims import Claims;"
        "assert Claims(LocalStorage(Path(sys.argv[1])), 40.0).take('a'); print('taken', flush=True);"
        "signal.pause()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    claims, _ = make_claims(storage)
    assert not claims.take("a")
    process.kill()
    while not claims.take("a"):  # dead before it is waited for: a zombie holds nothing
        time.sleep(0.01)
    assert process.wait() == -9


def test_another_machines_process_is_not_judged_by_its_number(storage):
    holder, _ = make_claims(storage)
    assert holder.take("a")
    claim = json.loads(storage.read("claims/a.json"))
    claim |= {"machine": "elsewhere", "process": f"{os.getpid() + 1_000_000} 1"}
    storage.write("claims/a.json", json.dumps(claim).encode())
    other, clock = make_claims(storage)
    assert not other.take("a")
    clock.now += LEASE_S
    assert other.take("a")


def test_a_worker_that_hangs_lets_its_claims_lapse(storage):
    clock = Clock(0.0)
    claims = Claims(storage, 0.02, clock)
    with claims:
        assert claims.take("a")
        wait_for(lambda: beat_of(storage) >= 2)  # it beats while it works
        clock.now += STALL_LEASES * 0.02
        time.sleep(0.05)
        stopped_at = beat_of(storage)
        time.sleep(0.1)
        assert beat_of(storage) == stopped_at
        claims.worked()
        wait_for(lambda: beat_of(storage) > stopped_at)


def beat_of(storage):
    return json.loads(storage.read("claims/a.json"))["beat"]


def wait_for(is_so):
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_waiting_for_a_claim_says_so_and_ends_when_it_is_given_up(storage, monkeypatch, caplog):
    monkeypatch.setattr(common.waiting, "FIRST_LINE_S", 0.0)
    caplog.set_level(logging.INFO)
    holder, _ = make_claims(storage)
    assert holder.take("start")
    waiter = Claims(storage, LEASE_S)
    threading.Timer(0.2, holder.give_up, ["start"]).start()
    with waiter.wait_for("start"):
        assert waiter.holds("start")
        assert not holder.holds("start")
    assert storage.names() == []
    assert f"waiting for the worker that holds {storage.url}/claims/start.json; " in caplog.text


def test_a_beat_survives_claims_that_somebody_cleared(storage):
    claims, _ = make_claims(storage)
    assert claims.take("a")
    clear_claims(storage)
    claims.beat()
    assert not claims.holds("a")
    claims.give_up("a")
    assert storage.names() == []
