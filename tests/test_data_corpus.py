"""Corpus shards read back what was written, in order, and refuse what is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import CorpusRow, iter_corpus, read_corpus_manifest, write_corpus

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


def make_row(index: int, ids: list[int], num_response: int, text: str = "hi") -> CorpusRow:
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(ids) - num_response :] = num_response > 0
    messages = json.dumps([{"role": "user", "content": text}], ensure_ascii=False)
    input_ids = np.array(ids, dtype=np.int32)
    return CorpusRow(f"id{index}", "s", "t", "train", messages, input_ids, mask, index % 2 == 0)


def equal(left: CorpusRow, right: CorpusRow) -> bool:
    arrays = {"input_ids", "loss_mask"}
    plain = {k: v for k, v in vars(left).items() if k not in arrays}
    return plain == {k: v for k, v in vars(right).items() if k not in arrays} and all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and np.array_equal(getattr(left, name), getattr(right, name))
        for name in arrays
    )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(token_ids, st.text(max_size=20)), max_size=9),
    per_shard=st.integers(1, 4),
)
def test_reads_back_what_was_written(tmp_path_factory, rows, per_shard):
    folder = tmp_path_factory.mktemp("corpus")
    written = [make_row(i, ids, len(ids) // 2, text) for i, (ids, text) in enumerate(rows)]
    write_corpus(folder, iter(written), {"model": "m"}, {"rows": len(rows)}, per_shard)
    manifest = read_corpus_manifest(folder)
    found = list(iter_corpus(folder, manifest))
    assert len(found) == len(written)
    assert all(map(equal, written, found))
    assert manifest.settings == {"model": "m"}
    assert manifest.counts == {"rows": len(rows)}
    assert [s.num_rows for s in manifest.shards] == [
        min(per_shard, len(rows) - i) for i in range(0, len(rows), per_shard)
    ]
    assert sum(s.num_tokens for s in manifest.shards) == sum(len(ids) for ids, _ in rows)
    assert sum(s.num_response_tokens for s in manifest.shards) == sum(
        len(ids) // 2 for ids, _ in rows
    )


def two_shards(folder: Path) -> None:
    rows = [make_row(i, list(range(10 * i, 10 * i + 8)), 4) for i in range(3)]
    write_corpus(folder, rows, {"model": "m"}, {}, 2)


def test_equal_input_gives_equal_bytes_and_fingerprint(tmp_path):
    two_shards(tmp_path / "a")
    two_shards(tmp_path / "b")
    for file in ("shard-00000.parquet", "shard-00001.parquet", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    a, b = read_corpus_manifest(tmp_path / "a"), read_corpus_manifest(tmp_path / "b")
    assert a.fingerprint == b.fingerprint
    write_corpus(tmp_path / "b", [make_row(0, [1, 2], 1)], {"model": "m"}, {}, 2)
    assert a.fingerprint != read_corpus_manifest(tmp_path / "b").fingerprint


def test_a_changed_shard_is_refused_by_name(tmp_path):
    two_shards(tmp_path)
    path = tmp_path / "shard-00001.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    rows = iter_corpus(tmp_path, read_corpus_manifest(tmp_path))
    assert next(rows).sample_id == "id0"
    assert next(rows).sample_id == "id1"
    with pytest.raises(ValueError, match=r"shard-00001\.parquet differs.*run the data stage again"):
        next(rows)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001\.parquet is missing"):
        list(iter_corpus(tmp_path, read_corpus_manifest(tmp_path)))


def test_an_unfinished_or_foreign_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the data stage first"):
        read_corpus_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "dflash-features", "version": 1}')
    with pytest.raises(ValueError, match="not a dflash-corpus version 1 manifest"):
        read_corpus_manifest(tmp_path)


@pytest.mark.parametrize("key", ["settings", "shards", "counts"])
@pytest.mark.parametrize("value", [None, 3, [3]])
def test_a_manifest_of_another_content_is_refused(tmp_path, key, value):
    two_shards(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(ValueError, match=r"manifest\.json does not hold.*run the data stage"):
        read_corpus_manifest(tmp_path)
    del manifest[key]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=key):
        read_corpus_manifest(tmp_path)
