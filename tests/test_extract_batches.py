"""Cutting and batching: from token counts alone, little padding, and no row's bits depend on its neighbours' content."""

import itertools

import numpy as np
import pytest
import torch
from conftest import FAMILIES, HYBRID
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import CorpusRow, write_corpus
from data.corpus_rows import CorpusRows, read_column
from extract.batches import SMALL, CorpusSlice, cut_lengths, cut_shards, length_batches
from extract.checks import measure_first_rows
from extract.slices import extract_slice
from target.taps import forward_with_taps

LAYERS = (1, 2, 4)


def make_row(index, num_tokens, seed=0):
    ids = np.random.default_rng([seed, index]).integers(0, 256, num_tokens).astype(np.int32)
    mask = np.arange(num_tokens) >= num_tokens // 3
    split = "train" if index % 3 else "test"
    return CorpusRow(f"sample-{index:03d}", "toy", "task", split, "[]", ids, mask, True)


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 100))
def test_the_cut_of_lengths_is_the_cut_of_rows(lengths, max_tokens):
    cuts = cut_lengths(lengths, max_tokens)
    slices = list(cut_shards([make_row(i, n) for i, n in enumerate(lengths)], max_tokens))
    assert [(cut.index, cut.num_rows, cut.num_tokens) for cut in cuts] == [
        (part.index, len(part.rows), part.num_tokens) for part in slices
    ]
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(len(lengths)))
    assert all(cut.num_tokens <= max_tokens or cut.num_rows == 1 for cut in cuts)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60),
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_batches_hold_every_row_once_within_tokens_and_padding(lengths, batch_tokens, max_padding):
    batches = length_batches(lengths, batch_tokens, max_padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= batch_tokens or len(batch) == 1
        padding = padded - sum(lengths[i] for i in batch)
        assert padding <= max_padding * padded or padded <= batch_tokens / SMALL
    # no batch could have taken the next one's first row too
    for batch, following in itertools.pairwise(batches):
        joined = [lengths[i] for i in (*batch, following[0])]
        padded = len(joined) * joined[0]
        is_dense = padded - sum(joined) <= max_padding * padded or padded <= batch_tokens / SMALL
        assert padded > batch_tokens or not is_dense


def test_positions_read_the_corpus_rows_across_groups_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr("data.corpus.ROWS_PER_GROUP", 4)
    rows = [make_row(index, 3 + index % 7) for index in range(45)]
    manifest = write_corpus(tmp_path, rows, {}, {}, rows_per_shard=10)
    found = CorpusRows(tmp_path, manifest)
    assert found.lengths.tolist() == [row.num_tokens for row in rows]
    assert read_column(tmp_path, manifest, "split").tolist() == [row.split for row in rows]
    for start, stop in [(0, 45), (44, 45), (9, 11), (3, 4), (0, 1), (12, 33), (5, 5)]:
        assert [row.sample_id for row in found.read(start, stop)] == [
            row.sample_id for row in rows[start:stop]
        ]
        for one, other in zip(found.read(start, stop), rows[start:stop], strict=True):
            assert one.input_ids.tolist() == other.input_ids.tolist()


def test_a_damaged_corpus_shard_is_named_before_its_rows_are_used(tmp_path):
    rows = [make_row(index, 9) for index in range(20)]
    manifest = write_corpus(tmp_path, rows, {}, {}, rows_per_shard=10)
    found = CorpusRows(tmp_path, manifest)
    path = tmp_path / "shard-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    assert len(found.read(0, 10)) == 10
    with pytest.raises(ValueError, match=r"shard-00001\.parquet differs from its sum"):
        found.read(0, 11)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001\.parquet is missing"):
        CorpusRows(tmp_path, manifest)


def features_of(config, target, rows):
    first = measure_first_rows(target, rows, LAYERS, 512)
    extracted = extract_slice(config, target, CorpusSlice(0, rows), first.tap_rms)
    assert not extracted.quarantined, extracted.quarantined
    return [row.features for row in extracted.rows]


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_padded_batches_equal_one_by_one_and_state_never_crosses_rows(
    tiny_config, tiny_target, family
):
    overrides = ["extract.batch_tokens=512", "extract.max_padding=1.0"]
    config, target = tiny_config(family, overrides), tiny_target(family)
    rows = [make_row(index, n) for index, n in enumerate([70, 9, 33, 64, 3, 70, 12, 51])]
    batches = length_batches([row.num_tokens for row in rows], 512)
    assert 1 < len(batches) < len(rows)
    padded = features_of(config, target, rows)
    for row, found in zip(rows, padded, strict=True):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)[None]
        alone = forward_with_taps(target, ids, torch.tensor([row.num_tokens]), LAYERS, False)
        torch.testing.assert_close(
            found, alone.features[0], rtol=1e-4, atol=1e-4
        )  # float32; a neighbour's state would be of order 1

    for changed in range(len(rows)):  # another text of the same length: the others keep every bit
        others = [*rows]
        others[changed] = make_row(changed, rows[changed].num_tokens, seed=1)
        found = features_of(config, target, others)
        same = [torch.equal(a, b) for a, b in zip(found, padded, strict=True)]
        assert same == [index != changed for index in range(len(rows))]
