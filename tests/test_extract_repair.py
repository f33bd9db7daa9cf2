"""A set is mended and resumed in the order and with the settings that made it; another recipe is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from extract_runs import ONE, bytes_of, features_of, make_rows, write_rows

from common.storage import open_storage
from configs.schema import Config
from extract.repair import repair
from extract.run import run_extract
from extract.verify import verify_files

CPU = torch.device("cpu")


@pytest.fixture
def make_run(tiny_config):
    """A finished extraction of 60 rows, three of them quarantined."""

    def make(*overrides: str) -> Config:
        settings = ["data.responses.generate=false", "extract.max_quarantined=0.1", *overrides]
        config = tiny_config("llama", settings)
        rows = make_rows(60)
        for number in (7, 8, 40):  # held out, training, training
            rows[number].input_ids[1] = 320  # one past the vocabulary
        write_rows(config, rows)
        run_extract(config, ONE)
        return config

    return make


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def changed(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=dict(values))}
    )


def mend(config: Config) -> None:
    storage = open_storage(features_of(config))
    repair(storage, verify_files(storage), config, CPU)


def test_shards_in_a_streams_order_are_mended_to_equal_bytes(make_run):
    """Every one damaged; rows were quarantined from both kinds of shards."""
    config = make_run("train.shuffle_window=2")
    folder = features_of(config)
    whole = bytes_of(folder)
    shards = [name for name in whole if name.startswith("shard-")]
    assert len(shards) > 2
    for name in shards:
        flip(folder / name, len(whole[name]) // 2)
    mend(config)
    assert bytes_of(folder) == whole


@pytest.mark.parametrize(
    ("made_with", "section", "values", "message"),
    [
        ("train.shuffle_window=2", "train", {"shuffle_window": None}, "rows='by-split', this run has None"),
        ("extract.soft_labels=4", "extract", {"soft_labels": 0}, "soft_labels=4, this run has None"),
    ],
)  # fmt: skip
def test_a_recipe_that_leaves_a_setting_out_makes_nothing_again(
    make_run, made_with, section, values, message
):
    config = make_run(made_with)
    folder, other = features_of(config), changed(config, section, **values)
    flip(folder / "shard-000000.parquet", 5000)
    damaged = bytes_of(folder)
    with pytest.raises(ValueError, match=message):
        mend(other)
    (folder / "shard-000000.parquet").unlink()
    with pytest.raises(ValueError, match=message):
        run_extract(other, ONE)
    found = {name: data for name, data in bytes_of_files(folder).items() if name in damaged}
    assert found == {name: data for name, data in damaged.items() if name != "shard-000000.parquet"}
    run_extract(config, ONE)
    assert verify_files(open_storage(folder)).damages == []


def bytes_of_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_held_out_rows_are_no_complete_set_of_all(make_run):
    config = make_run("train.source=online", "train.shuffle_window=2")
    every = changed(config, "train", source="shards", shuffle_window=None)
    with pytest.raises(ValueError, match="rows='held-out', this run has None"):
        run_extract(every, ONE)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_lost_list_of_rows_is_made_again_from_the_shards(make_run, is_gone):
    """With a shard that is lost as well."""
    config = make_run()
    folder = features_of(config)
    whole = bytes_of(folder)
    if is_gone:
        (folder / "rows.parquet").unlink()
    else:
        flip(folder / "rows.parquet", 300)
    (folder / "shard-000001.parquet").unlink()
    run_extract(config, ONE)
    assert bytes_of(folder) == whole


def test_a_damaged_list_of_rows_is_no_manifest(make_run):
    """manifest.json is gone, and rows.parquet, which holds it too, has a flipped bit."""
    config = make_run()
    folder = features_of(config)
    (folder / "manifest.json").unlink()
    data = (folder / "rows.parquet").read_bytes()
    for offset in range(4, len(data) - 8, 97):
        flip(folder / "rows.parquet", offset)
        try:
            found = verify_files(open_storage(folder))
        except ValueError as error:
            assert "rows.parquet" in str(error) or "manifest.json" in str(error), offset  # noqa: PT017
        else:  # a word of the settings or sums in its metadata: then the shards contradict it
            assert {damage.file for damage in found.damages} > {"manifest.json"}, offset
        (folder / "rows.parquet").write_bytes(data)
    mend(config)
    assert verify_files(open_storage(folder)).damages == []
