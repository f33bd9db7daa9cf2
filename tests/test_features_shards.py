"""Feature shards on disk: what was written is read, equal rows are equal bytes, damage is named."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from common.files import sha256_file, write_json
from data.feature_manifest import (
    FeatureManifest,
    HeadEntry,
    QuarantinedRow,
    ShardEntry,
    manifest_path,
    read_feature_manifest,
    write_feature_manifest,
)
from data.feature_shards import CHUNK_TOKENS, FeatureLayout, FeatureRow, write_shard
from data.features import open_features, verify_features

NUM_TAPS, HIDDEN = 2, 8
LENGTHS = ((5, 9, 3), (7, 4))


def make_row(index: int, num_tokens: int, dtype=torch.bfloat16) -> FeatureRow:
    generator = torch.Generator().manual_seed(index)
    return FeatureRow(
        sample_id=f"sample-{index}",
        source="toy",
        task="math",
        split=("train", "validation")[index % 2],
        input_ids=torch.randint(0, 248_320, (num_tokens,), generator=generator),
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.5,
        features=torch.randn(num_tokens, NUM_TAPS, HIDDEN, generator=generator).to(dtype),
    )


def write_set(folder, codec, lengths=LENGTHS):
    """A features folder as extract makes it; gives the rows written."""
    folder.mkdir()
    dtype = torch.float32 if codec == "fp32" else torch.bfloat16
    written, shards = [], []
    for number, shard_lengths in enumerate(lengths):
        rows = [make_row(len(written) + i, n, dtype) for i, n in enumerate(shard_lengths)]
        path = folder / f"shard-{number:06d}.parquet"
        write_shard(path, rows, FeatureLayout(codec, NUM_TAPS, HIDDEN))
        entries = [
            {
                "sample_id": row.sample_id,
                "source": row.source,
                "task": row.task,
                "split": row.split,
                "num_tokens": len(row.input_ids),
                "num_response_tokens": int(row.loss_mask.sum()),
            }
            for row in rows
        ]
        shards.append(
            ShardEntry(
                path.name,
                len(rows),
                sum(shard_lengths),
                path.stat().st_size,
                sha256_file(path),
                entries,
            )
        )
        written += rows
    head = folder / "target_head.safetensors"
    head.write_bytes(b"head")
    settings = {"target_layer_ids": [1, 3], "hidden_size": HIDDEN, "codec": codec}
    manifest = FeatureManifest(
        settings,
        shards,
        [QuarantinedRow("x", "shard-000000.parquet", "why")],
        HeadEntry(head.name, sha256_file(head)),
    )
    write_feature_manifest(folder, manifest)
    return written


def assert_same_row(found: FeatureRow, wanted: FeatureRow):
    assert (found.sample_id, found.source, found.task, found.split) == (
        wanted.sample_id,
        wanted.source,
        wanted.task,
        wanted.split,
    )
    assert torch.equal(found.input_ids, wanted.input_ids)
    assert torch.equal(found.loss_mask, wanted.loss_mask)
    assert found.features.dtype == wanted.features.dtype
    assert torch.equal(found.features, wanted.features)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "bf16-planes"])
def test_reads_back_what_was_written_in_any_order(tmp_path, codec):
    written = write_set(tmp_path / "features", codec)
    features = open_features(tmp_path / "features")
    assert [entry.sample_id for entry in features.entries] == [row.sample_id for row in written]
    for index in (4, 0, 2, 3, 1, 0):
        assert_same_row(features.read(features.entries[index]), written[index])
    assert [entry.sample_id for entry in features.of_split("validation")] == [
        "sample-1",
        "sample-3",
    ]
    assert features.of_split("test") == []
    assert features.target_layer_ids == (1, 3)


def test_fp8_reads_back_close(tmp_path):
    written = write_set(tmp_path / "features", "fp8")
    features = open_features(tmp_path / "features")
    for entry, row in zip(features.entries, written, strict=True):
        found = features.read(entry).features
        torch.testing.assert_close(found.float(), row.features.float(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("codec", ["bf16", "bf16-planes", "fp8", "fp32"])
def test_equal_rows_give_equal_bytes(tmp_path, codec):
    write_set(tmp_path / "a", codec)
    write_set(tmp_path / "b", codec)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "bf16-planes", "fp8"])
def test_a_stored_row_decodes_its_first_tokens_where_they_are_wanted(tmp_path, codec):
    write_set(tmp_path / "features", codec)
    features = open_features(tmp_path / "features")
    entry = features.entries[1]
    whole, stored = features.read(entry), features.read_stored(entry)
    assert_same_row(stored.decoded(), whole)
    assert (stored.dtype, stored.token_shape) == (whole.dtype, whole.token_shape)
    for row in (stored, whole):
        out = torch.zeros(6, NUM_TAPS, HIDDEN, dtype=row.dtype)
        row.features_into(out[:4])
        assert torch.equal(out[:4], whole.features[:4])
        assert not out[4:].any()


@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 1])
def test_long_rows_are_cut_into_chunks(tmp_path, num_tokens):
    written = write_set(tmp_path / "features", "bf16-planes", ((num_tokens,),))
    path = tmp_path / "features" / "shard-000000.parquet"
    blobs = pq.read_table(path).column("features_low")[0].as_py()
    assert [len(blob) for blob in blobs] == [
        min(CHUNK_TOKENS, num_tokens - start) * NUM_TAPS * HIDDEN
        for start in range(0, num_tokens, CHUNK_TOKENS)
    ]
    features = open_features(tmp_path / "features")
    assert_same_row(features.read(features.entries[0]), written[0])


def test_a_row_beyond_a_parquet_page_is_refused_by_name(tmp_path):
    row = make_row(0, 50_000)
    wide = replace(row, features=torch.zeros(1, 1, 1).expand(50_000, 1, 25_600))
    with pytest.raises(
        ValueError, match=r"sample-0 has 50000 tokens.*bf16 a row holds at most 41941"
    ):
        write_shard(tmp_path / "shard", [wide], FeatureLayout("bf16", 1, 25_600))


def test_only_the_high_plane_is_compressed_and_nothing_has_a_dictionary(tmp_path):
    write_set(tmp_path / "features", "bf16-planes")
    metadata = pq.read_metadata(tmp_path / "features" / "shard-000000.parquet")
    assert metadata.num_row_groups == len(LENGTHS[0])
    group = metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    assert {c.path_in_schema for c in columns if c.compression == "ZSTD"} == {
        "features_high.list.element"
    }
    assert not any(c.has_dictionary_page or c.is_stats_set for c in columns)
    assert metadata.metadata[b"version"] == b"1"


def test_opening_opens_no_shard_and_reading_keeps_few_open(tmp_path):
    write_set(tmp_path / "features", "bf16", tuple((2,) for _ in range(12)))
    features = open_features(tmp_path / "features")
    assert len(features._open) == 0
    for entry in features.entries:
        features.read(entry)
    assert len(features._open) == 8
    features.read(features.entries[0])


@pytest.mark.parametrize("codec", ["bf16", "bf16-planes"])
def test_a_flipped_bit_is_named_by_verify_and_by_reading(tmp_path, codec):
    folder = tmp_path / "features"
    write_set(folder, codec)
    assert verify_features(folder) == 4
    path = folder / "shard-000001.parquet"
    data = bytearray(path.read_bytes())
    name = b"features" if codec == "bf16" else b"features_low"
    position = data.find(open_row_bytes(folder, name.decode()))
    assert position > 0
    data[position + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-000001\.parquet has another sha256.*delete it"):
        verify_features(folder)
    features = open_features(folder)  # sizes agree
    with pytest.raises(
        ValueError, match=r"shard-000001\.parquet, row 0 \(sample sample-3\).*extract"
    ):
        features.read(features.entries[3])
    features.read(features.entries[4])  # the other row of the shard is whole


def open_row_bytes(folder, column) -> bytes:
    return pq.read_table(folder / "shard-000001.parquet").column(column)[0].as_py()[0]


def test_a_truncated_or_missing_shard_is_named_at_opening(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    path = folder / "shard-000001.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        ValueError, match=r"shard-000001\.parquet has \d+ bytes, not \d+; delete it"
    ):
        open_features(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-000001\.parquet is missing"):
        open_features(folder)


def test_garbage_of_the_right_size_is_one_line(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    path = folder / "shard-000000.parquet"
    path.write_bytes(b"x" * path.stat().st_size)
    features = open_features(folder)
    with pytest.raises(ValueError, match=r"shard-000000\.parquet, row 1 .*cannot be read"):
        features.read(features.entries[1])


def test_a_row_that_is_another_sample_is_refused(tmp_path):
    write_set(tmp_path / "features", "bf16")
    features = open_features(tmp_path / "features")
    with pytest.raises(ValueError, match="it holds sample sample-1"):
        features.read(replace(features.entries[1], sample_id="other"))


def test_no_manifest_and_other_manifests_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"launch\.sh extract"):
        open_features(tmp_path)
    write_json(manifest_path(tmp_path), {"format": "dflash-corpus", "version": 1})
    with pytest.raises(ValueError, match="no dflash-features manifest of version 1 or 2"):
        open_features(tmp_path)
    write_json(manifest_path(tmp_path), {"format": "dflash-features", "version": 1})
    with pytest.raises(ValueError, match="settings"):
        open_features(tmp_path)


def test_a_manifest_with_other_fields_says_what_to_do(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    whole = read_feature_manifest(folder).to_json()  # version 1 holds the rows
    shard = whole["shards"][0]
    for changed in (
        {"settings": {}},
        {"shards": [{**shard, "rows": None}]},
        {"shards": [{**shard, "rows": [{}]}]},
        {"head": None},
    ):
        write_json(manifest_path(folder), whole | changed)
        with pytest.raises(ValueError, match=r"manifest\.json does not hold.*launch\.sh extract"):
            open_features(folder)


def test_version_1_with_its_rows_inside_is_the_same_set(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    new, manifest = open_features(folder), read_feature_manifest(folder)
    write_json(manifest_path(folder), manifest.to_json())
    (folder / "rows.parquet").unlink()
    old = open_features(folder)
    assert old.entries == new.entries
    assert old.settings == new.settings
    assert read_feature_manifest(folder).shards == manifest.shards
    assert torch.equal(old.read(old.entries[2]).features, new.read(new.entries[2]).features)


def test_a_manifest_or_rows_that_were_changed_are_refused_at_opening(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    whole = manifest_path(folder).read_text()
    manifest_path(folder).write_text(whole.replace('"num_tokens": 17', '"num_tokens": 16'))
    with pytest.raises(ValueError, match=r"differs from the sum it holds of itself.*--repair"):
        open_features(folder)
    manifest_path(folder).write_text(whole)
    rows = bytearray((folder / "rows.parquet").read_bytes())
    rows[-20] ^= 1
    (folder / "rows.parquet").write_bytes(rows)
    with pytest.raises(ValueError, match=r"rows\.parquet differs from its sum in the manifest"):
        open_features(folder)


def test_the_targets_head_is_read_through_before_use(tmp_path):
    folder = tmp_path / "features"
    write_set(folder, "bf16")
    path = open_features(folder).checked_head()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    features = open_features(folder)
    with pytest.raises(ValueError, match=f"{path.name} differs from its sum.*delete it"):
        features.checked_head()
