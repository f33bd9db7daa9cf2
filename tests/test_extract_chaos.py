"""Whatever happens to workers and storage, the set comes out byte for byte, and every row is accounted for."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import yaml
from extract_runs import (
    ONE,
    assert_same_folder,
    bytes_of,
    features_of,
    make_rows,
    start_worker,
    write_rows,
)

import extract.run as stage
import extract.work
from common.storage import LocalStorage, Storage
from data.corpus_rows import CorpusRows
from data.feature_manifest import read_feature_manifest
from data.features import verify_features
from extract import patience
from extract.run import run_extract

LEASE_S = 0.2


class TroubledStorage(Storage):
    """A folder where `trouble` may raise before every call, and `after` when the call has had its effect."""

    def __init__(
        self,
        folder: Path,
        trouble: Callable[[int], None],
        after: Callable[[int], None] = lambda number: None,
    ):
        self.inner, self.url = LocalStorage(folder), str(folder)
        self._trouble, self._after = trouble, after
        self._lock = threading.Lock()
        self.num_calls = 0

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self.num_calls += 1
            number = self.num_calls
        self._trouble(number)
        yield
        self._after(number)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        with self._call():
            return self.inner.sizes(prefix)

    def size(self, name: str) -> int:
        with self._call():
            return self.inner.size(name)

    def read(self, name: str) -> bytes:
        with self._call():
            return self.inner.read(name)

    def open(self, name: str) -> BinaryIO:
        with self._call():
            return self.inner.open(name)

    def aside(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return self.inner.aside(name)

    def put(self, name: str, path: Path) -> None:
        with self._call():
            self.inner.put(name, path)

    def local_copy(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return self.inner.local_copy(name)

    def write(self, name: str, data: bytes) -> None:
        with self._call():
            self.inner.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._call():
            return self.inner.create(name, data)

    def delete(self, name: str) -> None:
        with self._call():
            self.inner.delete(name)

    def remove_leftovers(self) -> None:
        with self._call():
            self.inner.remove_leftovers()

    @property
    def folder(self) -> Path | None:
        return self.inner.folder


class Gone(OSError):
    """This machine is dead: nothing it does reaches the storage any more. Not tried again (EINVAL)."""

    def __init__(self):
        super().__init__(22, "the machine is gone")


def dies_at(call: int) -> Callable[[int], None]:
    def trouble(number: int) -> None:
        if number >= call:
            raise Gone

    return trouble


@pytest.fixture
def make_run(tiny_config, tiny_target, monkeypatch):
    """A run with a toy corpus, extracted on the one tiny target that is in memory."""
    monkeypatch.setattr(stage, "load_target", lambda *_: tiny_target("llama"))
    monkeypatch.setattr(patience, "WAITS_S", (0.0,) * 4)

    def make(rows, *overrides):
        settings = ["data.responses.generate=false", f"extract.lease_s={LEASE_S}", *overrides]
        config = tiny_config("llama", settings)
        write_rows(config, rows)
        return config

    return make


@pytest.fixture
def whole(make_run):
    """The undisturbed set of the same 40 rows, one of them bad."""
    config = make_run(some_rows(), "extract.max_quarantined=0.1")
    run_extract(config, ONE)
    return config


def some_rows():
    rows = make_rows(40)
    rows[18].input_ids[2] = 320  # one past the vocabulary
    return rows


def assert_nothing_lost(config, whole):
    assert_same_folder(features_of(config), features_of(whole))
    manifest = read_feature_manifest(features_of(config))
    stored = [row["sample_id"] for shard in manifest.shards for row in shard.rows]
    quarantined = [row.sample_id for row in manifest.quarantined]
    assert sorted(stored + quarantined) == [row.sample_id for row in some_rows()]
    assert quarantined == ["sample-018"]
    verify_features(features_of(config))


def run_on(config, storage, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(extract.work, "open_storage", lambda _: storage)
        run_extract(config, ONE)


def test_a_storage_that_fails_every_fifth_call_loses_nothing(make_run, whole, monkeypatch):
    def every_fifth(number):
        if number % 5 == 0:
            raise OSError(5, "Input/output error")

    for kind in ("before", "after"):  # lost on the way there, and on the way back
        config = make_run(some_rows(), "extract.max_quarantined=0.1")
        storage = TroubledStorage(
            features_of(config), *([every_fifth] if kind == "before" else [no_trouble, every_fifth])
        )
        run_on(config, storage, monkeypatch)
        assert storage.num_calls > 50
        assert_nothing_lost(config, whole)


def no_trouble(number: int) -> None: ...


def deaths(num_calls: int, how_many: int) -> list[int]:
    return sorted(random.Random(0).sample(range(1, num_calls), how_many))


def count_calls(make_run, monkeypatch) -> int:
    config = make_run(some_rows(), "extract.max_quarantined=0.1")
    storage = TroubledStorage(features_of(config), no_trouble)
    run_on(config, storage, monkeypatch)
    return storage.num_calls


@pytest.mark.parametrize("how_many", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_death_at_any_call_to_the_storage_loses_nothing(make_run, whole, monkeypatch, how_many):
    for call in deaths(count_calls(make_run, monkeypatch), how_many):
        config = make_run(some_rows(), "extract.max_quarantined=0.1")
        with contextlib.suppress(Gone):  # the last calls only tidy up
            run_on(config, TroubledStorage(features_of(config), dies_at(call)), monkeypatch)
        run_extract(config, ONE)
        assert_nothing_lost(config, whole)


def test_a_full_disk_stops_with_its_name_and_room_lets_it_go_on(make_run, whole, monkeypatch):
    config = make_run(some_rows(), "extract.max_quarantined=0.1")
    storage = TroubledStorage(features_of(config), no_trouble)
    real_put, num_put = storage.inner.put, []

    def put(name, path):
        if len(num_put) == 3:  # the head and two shards fitted
            raise OSError(28, "No space left on device")
        num_put.append(name)
        real_put(name, path)

    monkeypatch.setattr(storage.inner, "put", put)
    with pytest.raises(OSError, match="No space left"):
        run_on(config, storage, monkeypatch)
    left = sorted(path.name for path in features_of(config).rglob("*") if path.is_file())
    assert not [name for name in left if name.endswith(".tmp")], left  # it takes no room in vain
    assert not storage.inner.names("claims/")
    run_extract(config, ONE)
    assert_nothing_lost(config, whole)


def test_a_torn_shard_and_a_flipped_bit_come_out_right(make_run, whole, monkeypatch):
    config = make_run(some_rows(), "extract.max_quarantined=0.1")
    with monkeypatch.context() as patch:  # ended when all shards are there and no manifest is
        patch.setattr(stage, "finish_work", lambda *_: (_ for _ in ()).throw(Gone()))
        with pytest.raises(Gone):
            run_extract(config, ONE)
    torn = features_of(config) / "shard-000001.parquet"
    torn.write_bytes(torn.read_bytes()[:1000])
    run_extract(config, ONE)
    assert_nothing_lost(config, whole)
    flipped = features_of(config) / "shard-000000.parquet"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 16
    flipped.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-000000\.parquet"):
        verify_features(features_of(config))
    flipped.unlink()
    run_extract(config, ONE)
    assert_nothing_lost(config, whole)


def test_a_worker_that_sleeps_through_its_lease_does_no_harm(
    make_run, whole, tiny_target, monkeypatch
):
    """Stopped in the middle of a put while another takes its shard over, finishes the set and clears up behind it."""
    config = make_run(some_rows(), "extract.max_quarantined=0.1")
    asleep, wake = threading.Event(), threading.Event()
    storage = TroubledStorage(features_of(config), no_trouble)
    real_put, real_write = storage.inner.put, storage.inner.write

    def put(name, path):
        if name == "shard-000001.parquet":
            asleep.set()
            wake.wait(30)
        real_put(name, path)

    def write(name, data):
        if not (asleep.is_set() and name.startswith("claims/")):  # it beats no more
            real_write(name, data)

    monkeypatch.setattr(storage.inner, "put", put)
    monkeypatch.setattr(storage.inner, "write", write)
    sleepers = tiny_target("llama")
    others = replace(sleepers, model=copy.deepcopy(sleepers.model))  # as processes have
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(extract.work, "open_storage", lambda _: storage)
        sleeper = pool.submit(run_extract, config, ONE)
        assert asleep.wait(30)
        patch.setattr(extract.work, "open_storage", lambda url: LocalStorage(Path(url)))
        patch.setattr(stage, "load_target", lambda *_: others)
        run_extract(config, ONE)
        stored = LocalStorage(features_of(config))
        for name, data in bytes_of(features_of(whole)).items():
            assert stored.read(name) == data, name  # complete without it
        wake.set()
        sleeper.result()
    assert_nothing_lost(config, whole)


def test_a_worker_told_to_go_gives_its_claims_up_before_its_writers_are_done(
    make_run, whole, monkeypatch
):
    config = make_run(some_rows(), "extract.max_quarantined=0.1", "extract.lease_s=3600")
    storage = TroubledStorage(features_of(config), no_trouble)
    claims_at_exit: list[list[str]] = []
    told, real_put, real_read = threading.Event(), storage.inner.put, CorpusRows.read

    def put(name, path):
        if name.startswith("shard-"):  # uploads, slowly
            assert told.wait(30)
            wait_until(lambda: not storage.inner.names("claims/"))
            claims_at_exit.append(storage.inner.names("claims/"))
        real_put(name, path)

    def read(self, start, stop):
        if start > 20:  # what SIGTERM does in the main thread (common/command.py)
            told.set()
            raise SystemExit(143)
        return real_read(self, start, stop)

    monkeypatch.setattr(storage.inner, "put", put)
    with monkeypatch.context() as patch:
        patch.setattr(CorpusRows, "read", read)
        with pytest.raises(SystemExit):
            run_on(config, storage, monkeypatch)
    assert claims_at_exit
    assert not any(claims_at_exit)
    run_extract(config, ONE)  # nothing to wait an hour for
    assert_nothing_lost(config, whole)


@pytest.mark.slow
def test_random_kills_of_two_then_one_then_three_workers(make_run, tmp_path):
    """Real processes, kill -9 and SIGTERM at random moments, more and fewer workers each time."""
    whole, config = make_run(make_rows(900)), make_run(make_rows(900))
    run_extract(whole, ONE)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    generator, folder = random.Random(1), features_of(config)
    for num_workers in (2, 1, 3):
        wanted = num_done(folder) + 3
        with started(recipe, num_workers) as workers:
            wait_until(lambda: num_done(folder) >= wanted)  # noqa: B023  # called in this round only
            for worker in workers:
                time.sleep(0.3 * generator.random())
                worker.send_signal(generator.choice([signal.SIGKILL, signal.SIGTERM]))
            for worker in workers:
                worker.wait()
    assert 9 <= num_done(folder) < len(read_feature_manifest(features_of(whole)).shards)
    with started(recipe, 2) as workers:
        assert [worker.wait() for worker in workers] == [0, 0]
    assert_same_folder(folder, features_of(whole))


@contextlib.contextmanager
def started(recipe: Path, num_workers: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers that do not outlive the block."""
    workers = [start_worker(recipe) for _ in range(num_workers)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def num_done(folder: Path) -> int:
    return len(list(folder.glob("shard-*.json")))


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 600  # processes that import torch on a busy machine
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)
