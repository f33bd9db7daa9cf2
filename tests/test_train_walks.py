"""Walk starts are the anchors of the passes that replay counts, document by document, response by response."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_runs import ONE_RANK, make_config

from data.features import open_features
from drafter.model import Drafter
from evaluation.replay import ReplayOptions, replay_row
from evaluation.scores import find_responses
from target.head import load_target_head
from train.initialise import initial_drafter
from train.walks import find_walk_starts, pass_starts


def test_starts_by_hand_over_two_responses() -> None:
    """Response 1 at 2..7 has five tokens to decode, in passes of 2, 2, 1; response 2 at 9..11 two, in one pass."""
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    assert pass_starts(mask, [2, 2, 1, 2]) == [2, 4, 6, 9]
    with pytest.raises(AssertionError, match="beyond"):
        pass_starts(mask, [2, 2, 1, 2, 1])


def test_a_walk_follows_the_drafters_own_acceptance(tmp_path: Path) -> None:
    """From each start the next one is what the tree accepts there, plus the bonus token, further on."""
    config = make_config(tmp_path)
    features = open_features(config.run.folder / "features")
    head = load_target_head(features.checked_head(), "cpu", torch.float32)
    drafter: Drafter = initial_drafter(config)
    entries = features.of_split("train")[:5]
    found = find_walk_starts(drafter, head, features, entries, config.train, ONE_RANK)
    options = ReplayOptions((config.train.tree_budget,), names=("tree",))
    for entry in entries:
        row = features.read(entry)
        emitted = replay_row(drafter, head, row, options).passes["tree-8"]
        starts = found[entry.sample_id]
        assert len(starts) == len(emitted)
        firsts = {response.first for response in find_responses(row.loss_mask)}
        for start, count, following in zip(starts, emitted, [*starts[1:], None], strict=True):
            assert following is None or following in firsts or following == start + count
        assert firsts <= set(starts)
