"""Both sides of a stream as processes, killed and started again, on a folder and on a bucket that fails every fifth call."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_server import BUCKET, s3_server
from stream_runs import ONE_RANK, WINDOW, make_run

from common.storage import Storage, open_storage
from configs.schema import Config
from extract.run import run_extract
from extract.stream_ring import Ring

BUDGET = 3_500_000  # of four blocks of at most 1.1 MB, two of which a step may need
CHANGES = (
    "train.shuffle_window=1",
    "extract.batch_tokens=512",
    "extract.lease_s=2",
    "train.steps=40",  # two epochs
    "train.checkpoint_every=4",
    "train.eval_every=40",
)
KILLS = (("extract", 0), ("train", 1), ("extract", 3), ("train", 5), ("train", 6))
"""Who is killed once the trainer has come to which block."""
STREAM = ("train.source=stream", f"train.stream_bytes={BUDGET}")


def command(stage: str, config: Config, overrides: list[str]) -> list[str]:
    recipe = str(config.run.folder.parent / "tiny.yaml")
    return [sys.executable, "-m", stage, recipe, *WINDOW, *overrides]


@contextlib.contextmanager
def place(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Overrides that put the features there."""
    if kind == "folder":
        yield []
        return
    with s3_server(every=5) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield [f"extract.folder=s3://{BUCKET}/run"]
        assert server.gate.failed


def weights(config: Config) -> bytes:
    folder = config.run.folder / "checkpoints" / "step-00000040"
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_whoever_dies_the_run_is_that_of_shards(
    tiny_config: Callable[..., Config], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    shards = make_run(tiny_config, *CHANGES)
    run_extract(shards, ONE_RANK)
    subprocess.run(command("train", shards, [*CHANGES]), check=True, env=environment)

    with place(kind, monkeypatch) as where:
        overrides = [*CHANGES, *STREAM, *where]
        stream = make_run(tiny_config, *overrides)
        environment |= {name: value for name, value in os.environ.items() if "AWS" in name}
        most = run_with_kills(stream, overrides, environment)
        storage = open_storage(stream.features_location)
        assert storage.names("stream/") == ["stream/cursor.json"]
        assert [name for name in storage.names() if name.startswith("claims/")] == []
    assert most <= BUDGET
    assert weights(stream) == weights(shards)


def run_with_kills(config: Config, overrides: list[str], environment: dict[str, str]) -> int:
    """The trainer starts first; gives the most bytes that were in the ring."""
    storage = open_storage(config.features_location)
    sides: dict[str, subprocess.Popen[bytes]] = {}
    kills = list(KILLS)
    most, first = 0, True
    while True:
        for side in ("train",) if first else ("train", "extract"):
            process = sides.get(side)
            if process is None or (process.poll() not in (None, 0)):
                assert process is None or process.returncode == -9, side
                sides[side] = subprocess.Popen(command(side, config, overrides), env=environment)
        if first:
            time.sleep(8)  # it waits for the other side
            assert sides["train"].poll() is None
            first = False
        most = max(most, ring_bytes(storage))
        if all(process.poll() == 0 for process in sides.values()) and len(sides) == 2:
            assert not kills, "it ended before all were killed"
            return most
        cursor = Ring(storage).read_cursor()
        if kills and cursor is not None and ring_bytes(storage) and cursor.next >= kills[0][1]:
            victim = sides[kills.pop(0)[0]]
            victim.kill()
            victim.wait()
        time.sleep(0.05)


def ring_bytes(storage: Storage) -> int:
    sizes = storage.sizes("stream/")
    return sum(size for name, size in sizes.items() if Path(name).suffix == ".parquet")
