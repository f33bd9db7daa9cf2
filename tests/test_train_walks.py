"""Walk starts are the anchors of the passes that replay counts, document by document, response by response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_runs import ONE_RANK, make_config

from data.features import FeatureRow, open_features
from drafter.model import Drafter
from evaluation.replay import ReplayOptions, replay_row
from evaluation.scores import find_responses
from target.head import TargetHead, load_target_head
from train.initialise import initial_drafter
from train.vocabulary import TrainingHead
from train.walks import Walk, find_walk_starts, walk_documents


def pass_starts(loss_mask: Tensor, passes: Sequence[int]) -> list[int]:
    """Positions of the anchors of `passes`, tokens emitted by each, over the responses of one document in turn."""
    starts, emitted = [], iter(passes)
    for response in find_responses(loss_mask):
        done = 0
        while done < response.num_drafted:
            starts.append(response.first + done)
            done += next(emitted)
    assert next(emitted, None) is None, "passes beyond the document's responses"
    return starts


def test_starts_by_hand_over_two_responses() -> None:
    """Response 1 at 2..7 has five tokens to decode, in passes of 2, 2, 1; response 2 at 9..11 two, in one pass."""
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    assert pass_starts(mask, [2, 2, 1, 2]) == [2, 4, 6, 9]
    walk = Walk("", find_responses(mask), [])
    assert walk.begin_response()
    assert [walk.advance(count) for count in (1, 1, 1, 1)] == [True, True, True, False]
    assert walk.starts == [2, 4, 6, 9]


def whole(head: TargetHead) -> TrainingHead:
    return TrainingHead(head.head)


@pytest.fixture
def case(tmp_path: Path) -> tuple[Drafter, TargetHead, list[FeatureRow]]:
    """In float64, where rounding flips no near-tie; the second document has two responses, the last none."""
    config = make_config(tmp_path)
    features = open_features(config.run.folder / "features")
    head = load_target_head(features.checked_head(), "cpu", torch.float64)
    rows = [features.read(entry) for entry in features.of_split("train")[:12]]
    gap = rows[1].loss_mask.clone()
    gap[int(gap.nonzero()[5])] = False
    rows[1] = replace(rows[1], loss_mask=gap)
    rows[-1] = replace(
        rows[-1], loss_mask=torch.zeros_like(gap[:1]).expand(len(rows[-1].input_ids))
    )
    return initial_drafter(config).double(), head, rows


@pytest.mark.parametrize("max_documents", [1, 3, 64])
@pytest.mark.parametrize("budget", [1, 8, 4096])
def test_walks_are_those_of_replay_in_any_company(
    case: tuple[Drafter, TargetHead, list[FeatureRow]],
    tmp_path: Path,
    max_documents: int,
    budget: int,
) -> None:
    """Documents of unlike lengths share a cache, take each other's places and see nothing beyond their anchors."""
    drafter, head, rows = case
    train = make_config(tmp_path).train.model_copy(update={"tree_budget": budget})
    options = ReplayOptions((budget,), names=("tree",))
    longest = max(len(row.input_ids) for row in rows)
    found = dict(
        walk_documents(
            drafter, head.embedding, whole(head), iter(rows), train, longest, max_documents
        )
    )
    assert found == {
        row.sample_id: pass_starts(
            row.loss_mask, replay_row(drafter, head, row, options).passes[f"tree-{budget}"]
        )
        for row in rows
    }
    assert found[rows[-1].sample_id] == []


def test_walks_end_where_documents_are_cut(
    case: tuple[Drafter, TargetHead, list[FeatureRow]], tmp_path: Path
) -> None:
    """Before the cut they are those of the whole document."""
    drafter, head, rows = case
    train = make_config(tmp_path).train
    longest = max(len(row.input_ids) for row in rows)
    asked = (drafter, head.embedding, whole(head))
    uncut = dict(walk_documents(*asked, iter(rows), train, longest))
    cut = longest * 2 // 3
    for sample_id, starts in walk_documents(*asked, iter(rows), train, cut):
        assert starts == [start for start in uncut[sample_id] if start < cut - 1]


def test_rows_of_the_head_stand_for_tokens_in_any_order(
    case: tuple[Drafter, TargetHead, list[FeatureRow]], tmp_path: Path
) -> None:
    """train.vocabulary=corpus keeps some rows of the head and gives them numbers of their own."""
    drafter, head, rows = case
    train = make_config(tmp_path).train
    longest = max(len(row.input_ids) for row in rows)
    order = torch.randperm(len(head.head), generator=torch.Generator().manual_seed(0))
    other = TrainingHead(head.head[order], order.argsort())
    found, wanted = (
        dict(walk_documents(drafter, head.embedding, rows_of, iter(rows), train, longest))
        for rows_of in (other, whole(head))
    )
    assert found == wanted


def test_find_walk_starts_leaves_the_drafter_as_it_was(tmp_path: Path) -> None:
    """Every document once, at train.tree_budget, up to train.max_tokens, and back in training mode."""
    config = make_config(tmp_path)
    features = open_features(config.run.folder / "features")
    head = load_target_head(features.checked_head(), "cpu", torch.float32)
    drafter = initial_drafter(config).train()
    entries = features.of_split("train")[:5]
    twice = [*entries, entries[0]]
    found = find_walk_starts(
        drafter, head.embedding, whole(head), features, twice, config.train, ONE_RANK
    )
    assert found is not None
    assert drafter.training
    options = ReplayOptions((config.train.tree_budget,), names=("tree",))
    limit = config.train.max_tokens
    assert set(found) == {entry.sample_id for entry in entries}
    assert any(entry.num_tokens > limit for entry in entries)
    for entry in entries:
        row = features.read(entry)
        passes = replay_row(drafter.eval(), head, row, options).passes["tree-8"]
        starts = pass_starts(row.loss_mask, passes)
        assert found[entry.sample_id] == [start for start in starts if start < limit - 1]
