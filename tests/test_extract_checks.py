"""Cutting and checking: brute-force properties of shards and batches; each fault of a row is found and named."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.corpus import CorpusRow
from extract.batches import cut_shards, length_batches, shard_tokens
from extract.checks import (
    FirstRows,
    features_problem,
    ids_problem,
    padded_batch,
    require_greedy_match,
    token_rms,
)


def make_row(ids, mask=None):
    ids = np.array(ids, dtype=np.int32)
    mask = np.ones(len(ids), dtype=bool) if mask is None else np.array(mask)
    return CorpusRow("id", "source", "task", "train", "[]", ids, mask, True)


@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_tokens=st.integers(1, 120))
def test_shards_are_contiguous_full_and_within_the_limit(lengths, max_tokens):
    rows = [make_row([1] * n) for n in lengths]
    slices = list(cut_shards(iter(rows), max_tokens))
    assert [id(row) for part in slices for row in part.rows] == [id(row) for row in rows]
    assert [part.index for part in slices] == list(range(len(slices)))
    assert all(part.num_tokens <= max_tokens or len(part.rows) == 1 for part in slices)
    for part, following in pairwise(slices):
        assert part.num_tokens + following.rows[0].num_tokens > max_tokens


@given(lengths=st.lists(st.integers(1, 50), max_size=40), batch_tokens=st.integers(1, 200))
def test_batches_hold_every_row_once_sorted_and_within_the_limit(lengths, batch_tokens):
    batches = length_batches(lengths, batch_tokens)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens


def test_a_shard_holds_at_least_a_token():
    assert shard_tokens(1_000_000_000, 51_200) == 19_531
    assert shard_tokens(10, 51_200) == 1


def test_padding_keeps_ids_at_the_front():
    ids, lengths = padded_batch([make_row([5, 6, 7]), make_row([8])], torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert lengths.tolist() == [3, 1]


def test_token_rms_ignores_one_loud_token():
    features = torch.ones(5, 2, 4)
    features[:, 1] = 3.0
    features[0] = 1000.0  # attention sink
    assert token_rms(features).tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (make_row([]), "no tokens"),
        (make_row([1, 10]), "token id 10 is outside the vocabulary of 10"),
        (make_row([-3, 1]), "token id 3 is outside"),
        (make_row([1, 2], [True]), "loss_mask has 1 entries for 2 tokens"),
        (make_row([0, 9]), None),
    ],
)
def test_unreadable_ids(row, reason):
    found = ids_problem(row, 10)
    assert found is None if reason is None else found is not None and reason in found


ROW = make_row([3, 4, 5, 6])
IDS = torch.tensor([3, 4, 5, 6])
USUAL = torch.tensor([1.0, 1.0])


def good_features():
    return torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0))


def broken(change):
    features = good_features()
    change(features)
    return features


@pytest.mark.parametrize(
    ("ids", "features", "reason"),
    [
        (IDS, good_features(), None),
        (IDS, good_features()[:3], "3 feature vectors for 4 tokens"),
        (torch.tensor([0, 3, 4, 5]), good_features(), "the ids that the target read"),
        (IDS, broken(lambda f: f[2, 1, 5].fill_(float("inf"))), "not finite"),
        (IDS, broken(lambda f: f[2, 1, 5].fill_(float("nan"))), "not finite"),
        (IDS, broken(lambda f: f[:, 1].zero_()), "tap 1 has RMS 0"),
        (IDS, broken(lambda f: f[:, 0].mul_(50)), "tap 0 has RMS"),
        (IDS, broken(lambda f: f[:, 1].mul_(0.01)), "tap 1 has RMS"),
        (IDS, broken(lambda f: f[:, 0].copy_(f[:1, 0].expand(4, -1))), "tap 0 is the same"),
        (IDS, broken(lambda f: f.mul_(3)), None),  # rows differ; the band is wide
        (IDS, broken(lambda f: f.mul_(6)), "tap 0 has RMS"),
    ],
)
def test_each_fault_of_a_row_is_named(ids, features, reason):
    found = features_problem(ROW, ids, features, USUAL)
    assert found is None if reason is None else found is not None and reason in found


def test_one_token_over_and_over_may_have_one_state():
    features = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)).expand(4, -1, -1)
    row, ids = make_row([7] * 4), torch.tensor([7] * 4)
    assert features_problem(row, ids, features, USUAL) is None


def test_the_greedy_gate_has_a_threshold():
    require_greedy_match(FirstRows(USUAL, 100, 0.95), 0.95)
    with pytest.raises(ValueError, match=r"only 94\.0% of 100"):
        require_greedy_match(FirstRows(USUAL, 100, 0.94), 0.95)
