"""Toy corpora to extract, and folders to compare, for the tests of the stage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.distributed import Ranks
from configs.schema import Config
from data.corpus import CorpusRow, write_corpus
from data.settings import data_recipe
from target.identity import target_identity

ONE = Ranks(0, 1, 0, torch.device("cpu"))


def make_rows(num_rows: int, seed: int = 0, longest: int = 160) -> list[CorpusRow]:
    """Random ids; a third of each row is prompt, half of the rows are for training."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        num_tokens = int(generator.integers(3, longest))
        ids = generator.integers(0, 256, num_tokens).astype(np.int32)
        mask = np.arange(num_tokens) >= num_tokens // 3
        split = ("train", "train", "validation", "test")[index % 4]
        rows.append(CorpusRow(f"sample-{index:03d}", "toy", "task", split, "[]", ids, mask, True))
    return rows


def write_rows(config: Config, rows: Sequence[CorpusRow]) -> None:
    """The finished corpus of this run."""
    settings = target_identity(config.target) | {"data": "toy", "recipe": data_recipe(config.data)}
    write_corpus(config.run.folder / "corpus", rows, settings, {}, 64)


def features_of(config: Config) -> Path:
    return config.run.folder / "features"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same_folder(found: Path, wanted: Path) -> None:
    found_files, wanted_files = bytes_of(found), bytes_of(wanted)
    assert found_files.keys() == wanted_files.keys()
    for name, data in wanted_files.items():
        assert found_files[name] == data, name


def start_worker(recipe: Path, **environment: str) -> subprocess.Popen[bytes]:
    """`./launch.sh extract RECIPE` as one process on the CPU."""
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "extract", str(recipe)],
        cwd=Path(__file__).parents[1],
        env=os.environ | quiet | environment,
        stderr=subprocess.DEVNULL,
    )
