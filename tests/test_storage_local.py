"""Storage in a folder: whole or absent, created once, and nothing left of writers that died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common.storage import LocalStorage, open_storage

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from common.storage import open_storage
with open_storage(sys.argv[1]).aside("shards/a") as aside:
    aside.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_objects_are_listed_read_replaced_and_deleted(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "not" / "there")
    assert storage.names() == []
    storage.write("b", b"1")
    storage.write("claims/b", b"22")
    storage.write("claims/a", b"333")
    storage.write("claims-not/a", b"4444")
    assert storage.names() == ["b", "claims-not/a", "claims/a", "claims/b"]
    assert storage.sizes("claims/") == {"claims/a": 3, "claims/b": 2}
    assert storage.names("claims/b") == ["claims/b"]
    storage.write("b", b"new")
    assert storage.read("b") == b"new"
    storage.delete("b")
    storage.delete("b")
    assert not storage.exists("b")
    with pytest.raises(FileNotFoundError):
        storage.read("b")
    with pytest.raises(FileNotFoundError), storage.local_copy("b"):
        pass


def test_a_large_file_gets_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    with storage.aside("shards/a") as aside:
        aside.write_bytes(b"half")
        assert storage.names() == []
        aside.write_bytes(b"whole")
        storage.put("shards/a", aside)
    assert storage.read("shards/a") == b"whole"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_put_takes_a_file_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"abcdef")
    storage = open_storage(tmp_path / "store")
    storage.put("x", tmp_path / "mine")
    with storage.open("x") as file:
        file.seek(-2, os.SEEK_END)
        assert file.read() == b"ef"
    with storage.local_copy("x") as path:
        assert path == tmp_path / "store" / "x"


def test_of_many_creators_one_succeeds_and_its_bytes_stay(tmp_path: Path) -> None:
    storage, won = open_storage(tmp_path), []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        for claim in range(20):
            if storage.create(f"claims/{claim}", str(number).encode()):
                won.append((claim, number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim for claim, _ in won) == list(range(20))
    assert all(storage.read(f"claims/{claim}") == str(number).encode() for claim, number in won)
    assert len([*(tmp_path / "claims").iterdir()]) == 20  # nothing aside


def test_leftovers_of_a_killed_writer_go_and_a_living_ones_stay(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False)
    [left] = (tmp_path / "shards").iterdir()
    assert storage.names() == []
    with storage.aside("shards/a") as aside:
        aside.write_bytes(b"mine")
        storage.remove_leftovers()
        assert [*(tmp_path / "shards").iterdir()] == [aside]
    assert not left.exists()


def test_another_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ftp://host/x: no storage `ftp://`; use a path, s3:"):
        open_storage("ftp://host/x")
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)
