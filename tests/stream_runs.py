"""A tiny run whose corpus is big enough for blocks and windows, and the extracting side beside a test's own thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from common.distributed import Ranks
from configs.schema import Config
from data.corpus import CorpusRow, write_corpus
from data.settings import data_recipe
from extract.run import run_extract
from target.identity import target_identity

ONE_RANK = Ranks(0, 1, 0, torch.device("cpu"))
WINDOW = (
    "data.responses.generate=false",  # the toy responses are nobody's argmax
    "train.shuffle_window=2",
    "train.global_batch_samples=5",
    "train.max_tokens=64",
    "extract.max_quarantined=0.1",
)


def make_rows(num_rows: int, seed: int = 0) -> list[CorpusRow]:
    """Half of them to train on, the others held out; row 6, one to train on, has an id that no target can read."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        num_tokens = int(generator.integers(6, 160))
        ids = generator.integers(0, 256, num_tokens).astype(np.int32)
        ids[3] = 999 if index == 6 else ids[3]
        mask = np.arange(num_tokens) >= num_tokens // 3
        split = ("train", "validation", "train", "test")[index % 4]
        rows.append(CorpusRow(f"sample-{index:03d}", "toy", "task", split, "[]", ids, mask, True))
    return rows


def write_rows(config: Config, rows: list[CorpusRow]) -> None:
    settings = target_identity(config.target) | {"data": "toy", "recipe": data_recipe(config.data)}
    write_corpus(config.run.folder / "corpus", rows, settings, {}, 32)


def make_run(tiny_config: Callable[..., Config], *overrides: str, num_rows: int = 220) -> Config:
    """110 training rows in four blocks."""
    config = tiny_config(overrides=[*WINDOW, *overrides])
    write_rows(config, make_rows(num_rows))
    return config


@contextlib.contextmanager
def extracting(config: Config) -> Iterator[None]:
    """`./launch.sh extract` in another thread; the block ends with it, and raises what it raised."""
    failures: list[BaseException] = []

    def extract() -> None:
        try:
            run_extract(config, ONE_RANK)
        except BaseException as failure:  # noqa: BLE001  # handed to the test's own thread
            failures.append(failure)

    thread = threading.Thread(target=extract, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive(), "the extracting side does not end"
    for failure in failures:
        raise failure


def ring_files(config: Config) -> list[str]:
    """Everything of the stream but the cursor."""
    folder = Path(config.features_location) / "stream"
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name != "cursor.json"
    )
