"""Anchors: the rule position by position, independence of everything but the sample, the seed and the epoch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.anchors import Anchors, anchor_candidates, sample_anchors

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def draw(
    mask: list[bool], block_size: int = 5, num_anchors: int = 6, seed: int = 0, epoch: int = 0
) -> Anchors:
    input_ids = torch.arange(len(mask)) * 3 + 1
    return sample_anchors(
        input_ids, torch.tensor(mask), block_size, num_anchors, seed, epoch, "sample"
    )


@given(mask=masks, block_size=st.integers(2, 9), num_anchors=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_every_slot_follows_the_rule(mask: list[bool], block_size: int, num_anchors: int) -> None:
    anchors = draw(mask, block_size, num_anchors)
    allowed = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
    positions = anchors.positions.tolist()
    assert positions == sorted(set(positions))
    assert set(positions) <= set(allowed)
    assert len(positions) == min(num_anchors, len(allowed))
    for position, labels, label_mask in zip(
        positions, anchors.labels.tolist(), anchors.label_mask.tolist(), strict=True
    ):
        for k in range(1, block_size):
            inside = position + k < len(mask) and all(mask[position + 1 : position + k + 1])
            assert label_mask[k - 1] == inside
            assert labels[k - 1] == ((position + k) * 3 + 1 if inside else 0)


def test_labels_end_at_a_gap_and_do_not_start_again() -> None:
    anchors = draw([True, True, True, False, True, True], block_size=6, num_anchors=9)
    assert anchors.positions.tolist() == [0, 1, 4]
    assert anchors.label_mask.tolist() == [
        [True, True, False, False, False],
        [True, False, False, False, False],
        [True, False, False, False, False],
    ]


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_equal_arguments_draw_equal_anchors(seed: int, epoch: int) -> None:
    mask = [True] * 60
    torch.manual_seed(seed + epoch)  # the global generator is no part of it
    first = draw(mask, seed=seed, epoch=epoch)
    assert torch.equal(first.positions, draw(mask, seed=seed, epoch=epoch).positions)


def test_every_epoch_draws_anew_and_all_candidates_come_up() -> None:
    mask = [True] * 30
    seen = {p for epoch in range(60) for p in draw(mask, epoch=epoch).positions.tolist()}
    assert seen == set(range(29))
    assert draw(mask, epoch=0).positions.tolist() != draw(mask, epoch=1).positions.tolist()
    assert draw(mask, seed=0).positions.tolist() != draw(mask, seed=1).positions.tolist()


def test_the_rest_is_uniform_over_what_the_starts_leave() -> None:
    """105 candidates, 35 starts, half of 16 blocks at them: 27 of the other 97 candidates are starts as well."""
    mask, starts = torch.ones(106, dtype=torch.bool), torch.arange(0, 105, 3)
    ids = torch.zeros(106, dtype=torch.int64)
    drawn = [
        sample_anchors(ids, mask, 5, 16, 0, epoch, "sample", starts, 0.5) for epoch in range(400)
    ]
    at_starts = [int(torch.isin(anchors.positions, starts).sum()) for anchors in drawn]
    assert at_starts == [anchors.num_at_starts for anchors in drawn]
    assert min(at_starts) >= 8
    expected = 8 * 27 / 97
    assert abs(sum(at_starts) / 400 - 8 - expected) < 0.3  # five standard errors


def test_a_document_without_two_neighbouring_response_tokens_has_no_anchor() -> None:
    for mask in ([False] * 6, [True, False, True, False, True], [True]):
        assert len(anchor_candidates(torch.tensor(mask))) == 0
        assert draw(mask).labels.shape == (0, 4)
