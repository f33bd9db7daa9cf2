"""Damage of any kind is found, named and mended to equal bytes."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import extract.verify_command as command
from common.distributed import Ranks
from common.files import write_json
from common.storage import open_storage
from data.corpus import CorpusRow, write_corpus
from data.feature_manifest import manifest_path, read_feature_manifest
from data.features import open_features
from data.settings import data_recipe
from extract.repair import repair
from extract.run import run_extract
from extract.verify import FOOTER, check_shard, verify_files
from extract.verify_command import verify_parser
from extract.verify_sample import choose, compare_rows, load_same_target, relative_errors
from target.identity import target_identity

CPU = torch.device("cpu")
CODEC = "bf16-planes"


@pytest.fixture(scope="module")
def finished(tiny_config):
    """A finished run of 130 random rows in five shards, one row quarantined, soft labels beside the features."""
    overrides = [
        "data.responses.generate=false",
        f"extract.codec={CODEC}",
        "extract.max_quarantined=0.1",
        "extract.soft_labels=4",
    ]
    config = tiny_config("llama", overrides)
    generator = np.random.default_rng(0)
    rows = []
    for index in range(130):
        ids = generator.integers(0, 256, int(generator.integers(20, 160))).astype(np.int32)
        mask = np.arange(len(ids)) >= len(ids) // 3
        split = ("train", "validation")[index % 2]
        rows.append(CorpusRow(f"sample-{index:03d}", "toy", "task", split, "[]", ids, mask, True))
    rows[30].input_ids[2] = 320  # one past the vocabulary
    settings = target_identity(config.target) | {"data": "toy", "recipe": data_recipe(config.data)}
    write_corpus(config.run.folder / "corpus", rows, settings, {}, 256)
    run_extract(config, Ranks(0, 1, 0, CPU))
    folder = config.run.folder / "features"
    assert len(list(folder.glob("shard-*.parquet"))) >= 5
    return config, folder


@pytest.fixture
def damaged(finished, tmp_path):
    """The same run in a folder that a test may spoil: (config, folder, bytes of the whole one)."""
    config, whole = finished
    shutil.copytree(config.run.folder, tmp_path / "run")
    update = {"run": config.run.model_copy(update={"output_dir": tmp_path / "run"})}
    return config.model_copy(update=update), tmp_path / "run" / "features", bytes_of(whole)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def mend(config, folder):
    storage = open_storage(folder)
    verified = verify_files(storage, 2)
    names = repair(storage, verified, config, CPU)
    return verified, names


def shard(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:06d}.parquet"


def test_a_whole_folder_has_no_damage_and_every_row_is_compared(finished):
    _, folder = finished
    verified = verify_files(open_storage(folder))
    assert verified.damages == []
    assert sum(map(len, verified.entries.values())) == verified.manifest.num_rows == 129
    assert [row.sample_id for row in verified.manifest.quarantined] == ["sample-030"]


def everywhere(size: int, seed: str, count: int) -> list[tuple[int, int]]:
    """(offset, bit): the first and last bytes of a file, and random ones."""
    chooser = random.Random(seed)
    offsets = [0, 3, size - 1, size - 6, *(chooser.randrange(size) for _ in range(count))]
    return [(offset, chooser.randrange(8)) for offset in offsets]


@pytest.mark.parametrize(
    "file", ["rows.parquet", "manifest.json", "quarantine.jsonl", "target_head.safetensors"]
)
def test_a_flipped_bit_beside_the_shards_is_found_and_named(finished, file, tmp_path, monkeypatch):
    _, whole = finished
    folder = tmp_path / "features"
    shutil.copytree(whole, folder)
    monkeypatch.setattr("extract.verify.check_shard", lambda *_: [])  # another test's matter
    data = (folder / file).read_bytes()
    for offset, bit in everywhere(len(data), file, 12):
        flip(folder / file, offset, bit)
        damages = verify_files(open_storage(folder)).damages
        assert {damage.file for damage in damages} == {file}, offset
        (folder / file).write_bytes(data)


@pytest.fixture
def one_shard(finished, tmp_path):
    """A copy of a shard, and check() of it."""
    _, folder = finished
    features, entry = open_features(folder), read_feature_manifest(folder).shards[1]
    entries = [e for e in features.entries if e.shard == entry.file]
    path = shutil.copy(folder / entry.file, tmp_path)
    return Path(path), lambda: check_shard(Path(path), entry, entries, features.layout, {})


def test_a_flipped_bit_anywhere_in_a_shard_is_found(one_shard):
    """Pages, their headers, the footer and its length, the magic at both ends."""
    path, check = one_shard
    data = path.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    chooser = random.Random(0)
    in_footer = [
        (len(data) - 1 - chooser.randrange(footer), chooser.randrange(8)) for _ in range(12)
    ]
    assert check() == []
    for offset, bit in everywhere(len(data), "shard", 12) + in_footer:
        flip(path, offset, bit)
        assert check(), offset
        path.write_bytes(data)


def test_a_bit_of_a_row_is_named_by_that_row(one_shard):
    """Whatever is in the way: blobs, ids, page headers."""
    path, check = one_shard
    metadata, data = pq.read_metadata(path), path.read_bytes()
    chooser = random.Random(1)
    for index in range(0, metadata.num_row_groups, 3):
        group = metadata.row_group(index)
        columns = [group.column(i) for i in range(group.num_columns)]
        chosen = chooser.choice(columns)  # the smallest column as often as the largest
        offset = chosen.data_page_offset + chooser.randrange(chosen.total_compressed_size)
        flip(path, offset, chooser.randrange(8))
        [damage] = check()
        assert damage.where.startswith(f"row {index}"), (offset, damage)
        path.write_bytes(data)


def test_damage_of_every_kind_at_once_is_mended_to_equal_bytes(damaged):
    config, folder, whole = damaged
    flip(shard(folder, 0), 5000, 3)  # a page
    shard(folder, 1).write_bytes(whole["shard-000001.parquet"][:-11])  # cut short
    shard(folder, 2).write_bytes(whole["shard-000003.parquet"])  # swapped
    shard(folder, 3).write_bytes(whole["shard-000002.parquet"])
    shard(folder, 4).unlink()
    flip(folder / "target_head.safetensors", 999)
    flip(folder / "rows.parquet", 300)
    (folder / "quarantine.jsonl").write_text("nobody\n")
    verified, names = mend(config, folder)
    why = {damage.file: str(damage) for damage in verified.damages}
    assert "row " in why["shard-000000.parquet"]
    assert FOOTER in why["shard-000001.parquet"]
    assert "holds the bytes of shard-000003.parquet" in why["shard-000002.parquet"]
    assert "holds the bytes of shard-000002.parquet" in why["shard-000003.parquet"]
    assert "is missing" in why["shard-000004.parquet"]
    assert set(names) == set(whole) - {"manifest.json", *(n for n in whole if n > "shard-000004.parquet" and n.startswith("shard"))}  # fmt: skip
    assert bytes_of(folder) == whole
    assert verify_files(open_storage(folder)).damages == []


def test_what_can_mend_itself_needs_no_recipe_and_no_target(damaged, monkeypatch):
    _, folder, whole = damaged
    monkeypatch.setattr("extract.repair.load_target", None)
    flip(shard(folder, 0), 0)  # the magic: rows are whole
    flip(
        shard(folder, 1), len(whole["shard-000001.parquet"]) - 40
    )  # Arrow's schema text or the footer's end
    flip(folder / "manifest.json", 700)
    (folder / "quarantine.jsonl").unlink()
    storage = open_storage(folder)
    verified = verify_files(storage)
    easy = [d for d in verified.damages if d.can_mend_itself]
    assert {d.file for d in easy} >= {"shard-000000.parquet", "manifest.json", "quarantine.jsonl"}
    shard(folder, 1).write_bytes(whole["shard-000001.parquet"])
    repair(storage, verify_files(storage), None, CPU)
    assert bytes_of(folder) == whole


def test_rows_and_manifest_give_each_other_back(damaged):
    _, folder, whole = damaged
    for file in ("rows.parquet", "manifest.json"):
        (folder / file).unlink()
        repair(open_storage(folder), verify_files(open_storage(folder)), None, CPU)
        assert bytes_of(folder) == whole
    (folder / "rows.parquet").unlink()
    (folder / "manifest.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"manifest\.json cannot be used and there is no rows\.parquet"
    ):
        verify_files(open_storage(folder))


def test_only_the_target_makes_lost_rows_again(damaged):
    config, folder, _ = damaged
    flip(shard(folder, 0), 5000)
    with pytest.raises(ValueError, match=r"shard-000000\.parquet again: give --config RECIPE"):
        mend(None, folder)
    other = config.model_copy(
        update={"extract": config.extract.model_copy(update={"batch_tokens": 512})}
    )
    with pytest.raises(ValueError, match=r"batch_tokens=1024, this run has 512"):
        mend(other, folder)


def test_bytes_that_come_out_otherwise_replace_nothing(damaged, monkeypatch):
    config, folder, _ = damaged
    flip(shard(folder, 0), 5000)
    before = bytes_of(folder)
    monkeypatch.setattr("extract.repair.extract_slice", with_one_value_changed)
    with pytest.raises(ValueError, match=r"shard-000000\.parquet came out with other bytes"):
        mend(config, folder)
    assert bytes_of(folder) == before


def with_one_value_changed(*arguments):
    from extract.slices import extract_slice

    extracted = extract_slice(*arguments)
    first = extracted.rows[0]
    changed = first.features.clone()
    changed[0, 0, 0] += 1
    return replace(extracted, rows=[replace(first, features=changed), *extracted.rows[1:]])


def test_a_shard_of_good_bytes_that_is_not_what_the_rows_say_is_found(damaged):
    """The sums agree, the contents do not: a writer's fault, not the disk's."""
    _, folder, _ = damaged
    storage = open_storage(folder)
    manifest = read_feature_manifest(folder)
    value = manifest.to_json()  # version 1, whose rows are in the manifest
    value["shards"][1]["rows"][2]["split"] = "test"
    value["shards"][0]["num_tokens"] += 1
    write_json(manifest_path(folder), value)
    found = {d.file: str(d) for d in verify_files(storage).damages}
    assert "row 2" in found["shard-000001.parquet"]
    assert "tokens, not" in found["shard-000000.parquet"]


def test_sampled_rows_are_the_targets_bit_for_bit(finished):
    _, folder = finished
    features, manifest = open_features(folder), read_feature_manifest(folder, with_rows=False)
    chosen = choose(features.entries, 5, 7)
    assert chosen == choose(features.entries, 5, 7)
    assert len({entry.sample_id for entry in chosen}) == 5
    target = load_same_target(manifest.settings, CPU, None)
    found = compare_rows(features, manifest, target, chosen)
    assert all(row.is_same and row.is_good for row in found)


def test_features_of_another_layer_or_position_are_not_rounding(finished):
    _, folder = finished
    features = open_features(folder)
    stored = features.read(features.entries[0]).features
    assert max(relative_errors(stored, stored)) == 0
    assert min(relative_errors(stored[1:], stored[:-1])) > 0.3
    assert min(relative_errors(stored[:, :2], stored[:, 1:])) > 0.1


def test_the_command_says_what_it_found_and_mends(damaged, capsys):
    config, folder, whole = damaged
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    flip(shard(folder, 2), 4000)
    options = verify_parser().parse_args([str(folder), "--sample", "1"])
    with pytest.raises(ValueError, match=r"shard-000002\.parquet, row \d+ \(sample .*--repair"):
        command.main(options)
    options = verify_parser().parse_args([str(folder), "--repair", "--config", str(recipe)])
    command.main(options)
    assert bytes_of(folder) == whole
    said = capsys.readouterr().out
    assert "129 rows in" in said
    assert "all as the manifest says; 1 rows quarantined" in said
    assert "4 rows against a fresh forward" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["target.device_map=auto"], "changes a recipe: name it with --config RECIPE"),
        (["--threads", "0"], "--threads 0"),
        (["--sample=-1"], "--sample -1"),
    ],
)
def test_options_without_a_meaning_are_refused(finished, given, message):
    _, folder = finished
    with pytest.raises(ValueError, match=message):
        command.main(verify_parser().parse_intermixed_args([str(folder), *given]))


def test_another_target_is_refused_for_comparison(finished, tmp_path):
    config, folder = finished
    settings = dict(read_feature_manifest(folder, with_rows=False).settings)
    other = tmp_path / "other"
    shutil.copytree(config.target.model, other)
    weights = load_file(other / "model.safetensors")
    first = next(iter(weights))
    save_file(weights | {first: weights[first] + 1}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="the features was made with weights="):
        load_same_target(settings | {"model": str(other)}, CPU, None)
