"""Storage in a bucket against a real S3 server that fails calls on purpose: the same promises as in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import BUCKET, FAULTS, S3Server, s3_server

import common.object_storage
from common.object_storage import RETRIES, ObjectStorage
from common.storage import Storage, open_storage

UPLOAD = """
import sys
from pathlib import Path
from common.storage import open_storage
open_storage(sys.argv[1]).put("big", Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def storage(
    server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    """A prefix of its own for each test."""
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(common.object_storage.time, "sleep", lambda _: None)  # our own pauses
    server.gate.calls.clear()
    server.gate.failed.clear()
    yield open_storage(f"s3://{BUCKET}/{request.node.name}")
    server.gate.every, server.gate.faults, server.gate.busy = 0, FAULTS, None


def test_objects_are_listed_read_replaced_and_deleted(storage: Storage) -> None:
    assert storage.names() == []
    storage.write("b", b"1")
    storage.write("claims/b", b"22")
    storage.write("claims/a", b"333")
    storage.write("claims-not/a", b"4444")
    assert storage.names() == ["b", "claims-not/a", "claims/a", "claims/b"]
    assert storage.sizes("claims/") == {"claims/a": 3, "claims/b": 2}
    assert storage.names("claims/b") == ["claims/b"]
    storage.write("b", b"new")
    assert (storage.read("b"), storage.size("b")) == (b"new", 3)
    storage.delete("b")
    storage.delete("b")
    assert not storage.exists("b")
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/test_objects.*/b does not exist"):
        storage.read("b")


def test_a_large_file_goes_in_parts_and_comes_back(
    storage: Storage, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common.object_storage, "PART_BYTES", 5 * 2**20)  # the least S3 takes
    data = os.urandom(2**20) * 12
    (tmp_path / "big").write_bytes(data)
    server.gate.every = 5
    storage.put("shards/big", tmp_path / "big")
    with storage.local_copy("shards/big") as copy:
        assert copy.read_bytes() == data
    assert not copy.exists()
    parts = [call for call in server.gate.calls if "partNumber" in call]
    assert len({call.partition("partNumber=")[2][:1] for call in parts}) == 3
    assert server.gate.failed


def test_parquet_is_read_by_ranges(storage: Storage, server: S3Server, tmp_path: Path) -> None:
    table = pa.table({"x": [os.urandom(100_000) for _ in range(20)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1, use_dictionary=False)
    storage.put("t.parquet", tmp_path / "t.parquet")
    server.gate.calls.clear()
    server.gate.every, server.gate.faults = 3, ("half an answer", "busy")
    with storage.open("t.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(7).equals(table.slice(7, 1))
    reads = [call for call in server.gate.calls if call.startswith("GET")]
    assert len(reads) - len(server.gate.failed) <= 2  # the footer, the column


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_survives_every_fault(storage: Storage, server: S3Server, fault: str) -> None:
    storage.write("there", b"x" * 5000)
    server.gate.faults = (fault,)
    for number, (call, wanted) in enumerate(
        [
            (lambda: storage.read("there"), b"x" * 5000),
            (lambda: storage.size("there"), 5000),
            (lambda: storage.sizes(), {"there": 5000}),
            (lambda: storage.create("there", b"mine"), False),
            (lambda: storage.create("new", b"mine"), True),
            (lambda: storage.write("there", b"new"), None),
            (lambda: storage.delete("new"), None),
        ]
    ):
        server.gate.calls[:] = ["the next call fails, and every second after it"]
        server.gate.every = 2
        assert call() == wanted, number
        server.gate.every = 0
        assert len(server.gate.failed) > number
    assert storage.read("there") == b"new"
    assert storage.names() == ["there"]


def test_of_many_creators_one_succeeds_though_answers_are_lost(
    storage: Storage, server: S3Server
) -> None:
    won: list[tuple[int, int]] = []
    start = threading.Barrier(4)
    # the first call, which is somebody's PUT, loses its answer; which calls fail after it is up to the threads
    server.gate.calls[:] = ["the fifth call fails, and every fifth after it"] * 4
    server.gate.every, server.gate.faults = 5, ("answer lost", "half an answer", "busy", "refused")

    def create(number: int) -> None:
        start.wait()
        for claim in range(5):
            if storage.create(f"claims/{claim}", str(number).encode()):
                won.append((claim, number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim for claim, _ in won) == list(range(5))
    assert all(storage.read(f"claims/{claim}") == str(number).encode() for claim, number in won)
    assert any(failed.startswith("answer lost: PUT") for failed in server.gate.failed)


def test_an_upload_killed_in_the_middle_leaves_no_object(
    storage: Storage, server: S3Server, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(40 * 2**20))
    server.gate.busy = "partNumber=3"
    child = subprocess.Popen([sys.executable, "-c", UPLOAD, storage.url, str(tmp_path / "big")])
    deadline = time.monotonic() + 60
    while not any("partNumber=3" in call for call in server.gate.calls):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    server.gate.busy = None
    assert storage.names() == []
    assert not storage.exists("big")
    storage.put("big", tmp_path / "big")  # a later writer is not disturbed
    assert storage.size("big") == 40 * 2**20


def test_a_service_that_never_answers_is_one_line(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    server.gate.busy = "GET"
    with pytest.raises(OSError, match=r"^s3://bucket/x/a: .*503[^\n]*$"):
        ObjectStorage("s3://bucket/x").read("a")


def test_a_bucket_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "common.object_storage")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"s3://b/x: buckets need the package `obstore`.*\[s3\]"):
        open_storage("s3://b/x")
