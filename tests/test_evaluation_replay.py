"""Replay equals live decoding, pass for pass; and equals walks of trees built one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, HYBRID
from evaluation_cases import Case, make_case

from configs.schema import Config
from data.features import FeatureRow
from ddtree.cost import RoundCost
from ddtree.walk import walk_tree
from drafter.model import BlockLayout, block_embeddings
from evaluation.acceptors import Acceptor, draft_tree, tree_acceptor
from evaluation.decode import decode_with_tree
from evaluation.parity import compare_passes
from evaluation.records import replay_from_json, replay_to_json
from evaluation.replay import ReplayOptions, empty_sums, replay_row, replay_rows
from evaluation.scores import Response, find_responses
from evaluation.sums import RECALL_AT
from target.load import Target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]
BUDGETS = (1, 6, 40)
COST = RoundCost(tuple(1.0 + 0.03 * n for n in range(31)))
REPLAYED = ("chain", "tree", "tree_spine", "tree_cost")
OPTIONS = ReplayOptions(BUDGETS, names=REPLAYED, cost=COST)


@pytest.fixture(scope="module")
def trained(tiny_config: MakeConfig, tiny_target: MakeTarget) -> Case:
    config = tiny_config("llama", ["drafter.block_size=6"])
    return make_case(config, tiny_target("llama"), steps=90)


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_replay_is_live_pass_for_pass(
    family: str, tiny_config: MakeConfig, tiny_target: MakeTarget
) -> None:
    """Chain, tree, spine tree and the tree that a cost stops, at a temperature a slot."""
    layers = ["drafter.layer_types=[sliding_attention,full_attention]", "drafter.sliding_window=9"]
    config = tiny_config(family, ["drafter.block_size=5", *layers])
    case = make_case(config, tiny_target(family), num_prompts=3, steps=60)
    options = ReplayOptions((12,), (0.3, 4.0, 0.5, 2.0), names=REPLAYED, cost=COST)
    settings = case.settings(drafter_temperature=options.drafter_temperature, cost=COST)
    emitted, sizes = 0, set()
    for index, row in enumerate(case.rows):
        replayed = replay_row(case.drafter, case.head, row, options)
        decodes = []
        for acceptor in options.acceptors:
            decoded = decode_with_tree(
                case.verifier, case.drafter, case.head, case.ids(index), acceptor, settings
            )
            assert replayed.passes[acceptor.key] == decoded.passes
            decodes.append((acceptor, decoded))
            emitted += sum(count - 1 for count in decoded.passes)
            if acceptor.name == "tree_cost":
                sizes |= {len(record.tree) for record in decoded.records}
        parity = compare_passes(case.drafter, case.head, row, decodes, options)
        assert parity.num_equal == parity.num_passes == sum(len(d.passes) for _, d in decodes)
        assert parity.replay_passes == replayed.passes
    assert emitted > 5, "the test needs accepted drafts"
    assert len(sizes) > 1, "the test needs trees of the cost's own size"


def test_replay_is_the_walk_of_each_anchors_own_tree(trained: Case) -> None:
    """Every anchor by itself: the drafter's full logits, one tree, one walk along the record."""
    for row in trained.rows[2:4]:
        replayed = replay_row(trained.drafter, trained.head, row, OPTIONS)
        for acceptor in OPTIONS.acceptors:
            assert replayed.passes[acceptor.key] == _walked(trained, row, acceptor)


def _walked(case: Case, row: FeatureRow, acceptor: Acceptor) -> list[int]:
    first = int(row.loss_mask.int().argmax())
    last, anchor, passes = len(row.input_ids) - 1, first, []
    while anchor < last:
        log_probs = _slot_log_probs(case, row, anchor)
        ranked = log_probs.sort(dim=-1, descending=True, stable=True)
        token = int(row.input_ids[anchor])
        tree = draft_tree(acceptor, token, ranked.values, ranked.indices, COST)
        # the target follows the record: beyond its end, a token that nobody drafts
        ahead = torch.cat([row.input_ids[anchor + 1 :], torch.full((99,), -1)])
        nodes = walk_tree(tree, ahead[tree.depths]).nodes
        passes.append(min(len(nodes), last - anchor))
        anchor += passes[-1]
    return passes


def _slot_log_probs(case: Case, row: FeatureRow, anchor: int) -> torch.Tensor:
    """(L, V), from the features strictly before the anchor and no others."""
    config = case.drafter.config
    layout = BlockLayout(
        torch.arange(anchor)[None],
        torch.zeros(1, anchor, dtype=torch.int64),
        torch.tensor([[anchor]]),
        torch.zeros(1, 1, dtype=torch.int64),
    )
    blocks = block_embeddings(
        case.head.embedding,
        row.input_ids[None, anchor : anchor + 1],
        config.mask_token_id,
        config.block_size,
    )
    with torch.no_grad():
        hidden = case.drafter(row.features[None, :anchor], blocks, layout, "dense")[0, 0, 1:]
    return (hidden @ case.head.head.T).log_softmax(-1)


def test_bigger_trees_accept_more_and_the_chain_is_never_above_a_tree_that_holds_it(
    trained: Case,
) -> None:
    result = replay_rows(trained.drafter, trained.head, trained.rows, BUDGETS)
    macro = [result.acceptance(acceptor).macro for acceptor in result.options.acceptors]
    chain, one, six, forty = macro
    assert 1 < one < six < forty
    assert 1.2 < chain < forty


def test_chunks_of_anchors_change_nothing(trained: Case) -> None:
    row = trained.rows[4]
    whole = replay_row(trained.drafter, trained.head, row, OPTIONS)
    small = dataclasses.replace(OPTIONS, anchors_per_forward=5, head_chunk_rows=7)
    parts = replay_row(trained.drafter, trained.head, row, small)
    assert parts.passes == whole.passes
    torch.testing.assert_close(parts.sums.flat(), whole.sums.flat(), rtol=1e-5, atol=1e-5)


def test_responses_are_runs_of_the_mask_cut_at_the_limit() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    # the run of one token is prefill's alone: no pass
    assert find_responses(mask) == [Response(1, 2), Response(8, 1)]
    assert find_responses(mask, max_new_tokens=2) == [Response(1, 1), Response(8, 1)]
    assert find_responses(mask, max_new_tokens=1) == []


def test_turns_are_replayed_apart_and_belong_to_one_prompt(trained: Case) -> None:
    row = trained.rows[3]
    first = int(row.loss_mask.int().argmax())
    gap = first + 9
    mask = row.loss_mask.clone()
    mask[gap] = False
    turns = replay_row(
        trained.drafter, trained.head, dataclasses.replace(row, loss_mask=mask), OPTIONS
    )
    later = mask & (torch.arange(len(mask)) > gap)
    earlier = mask & (torch.arange(len(mask)) < gap)
    for key, passes in turns.passes.items():
        parts = [
            replay_row(
                trained.drafter, trained.head, dataclasses.replace(row, loss_mask=part), OPTIONS
            ).passes[key]
            for part in (earlier, later)
        ]
        assert passes == parts[0] + parts[1]
        assert sum(parts[0]) == 8
    assert turns.sums.acceptance[0, 1] == 1, "one prompt"


def test_replay_is_cut_where_live_decoding_is(trained: Case) -> None:
    limited = dataclasses.replace(OPTIONS, max_new_tokens=10)
    replayed = replay_row(trained.drafter, trained.head, trained.rows[3], limited)
    decoded = decode_with_tree(
        trained.verifier,
        trained.drafter,
        trained.head,
        trained.ids(3),
        tree_acceptor(40),
        trained.settings(max_new_tokens=10),
    )
    assert replayed.passes["tree-40"] == decoded.passes
    assert sum(decoded.passes) == 9


def test_sums_say_what_the_passes_say_and_survive_json_and_adding(trained: Case) -> None:
    result = replay_rows(trained.drafter, trained.head, trained.rows, BUDGETS)
    for acceptor in result.options.acceptors:
        assert result.sums.acceptance_of(acceptor.key).macro == pytest.approx(
            result.acceptance(acceptor).macro
        )
    again = empty_sums(trained.drafter.config, result.options)
    for row in result.rows:
        again += replay_from_json(replay_to_json(row)).sums
    torch.testing.assert_close(again.flat(), result.sums.flat())
    moved = again.with_flat(2 * again.flat())
    assert moved.acceptance_of("tree-6").macro == pytest.approx(again.acceptance_of("tree-6").macro)


def test_survival_recall_and_calibration_by_their_definitions(trained: Case) -> None:
    sums = replay_rows(trained.drafter, trained.head, trained.rows, BUDGETS).sums
    num_slots = trained.drafter.config.block_size - 1
    lengths = [int(row.loss_mask.sum()) - 1 for row in trained.rows]
    assert sums.labelled.tolist() == [sum(max(n - k, 0) for n in lengths) for k in range(num_slots)]
    assert sums.num_anchors.item() == sum(lengths)
    # expected accepted tokens is survival summed over depth
    torch.testing.assert_close(sums.survived.sum(1), sums.realised)
    assert (sums.survived.diff(dim=1) <= 0).all(), "a longer prefix never survives more often"
    assert (sums.recalled.diff(dim=0) >= 0).all()
    assert sums.recalled[RECALL_AT.index(1), 0] == sums.survived[0, 0], (
        "slot 1 of the chain is top 1"
    )
    # all nodes of the largest tree, and those that were right
    assert sums.bins[:, 1].sum() == pytest.approx(float(sums.predicted[-1]))
    assert sums.bins[:, 2].sum() == float(sums.realised[-1])


def test_a_pass_that_differs_is_listed_with_its_gap(trained: Case) -> None:
    acceptor = tree_acceptor(6)
    decoded = decode_with_tree(
        trained.verifier,
        trained.drafter,
        trained.head,
        trained.ids(3),
        acceptor,
        trained.settings(),
    )
    number = next(i for i, count in enumerate(decoded.passes) if count > 1)
    record = decoded.records[number]
    wrong = dataclasses.replace(record, num_emitted=record.num_emitted - 1)
    records = [*decoded.records[:number], wrong, *decoded.records[number + 1 :]]
    tampered = dataclasses.replace(decoded, records=records)
    parity = compare_passes(
        trained.drafter, trained.head, trained.rows[3], [(acceptor, tampered)], OPTIONS
    )
    assert parity.num_equal == parity.num_passes - 1
    [found] = parity.differing
    assert (found.anchor, found.live, found.replay) == (
        record.anchor,
        record.num_emitted - 1,
        record.num_emitted,
    )
    assert not found.is_near_tie


def test_expected_tokens_and_nodes_are_those_of_each_anchors_own_tree(trained: Case) -> None:
    """Sums of path probabilities and of sizes over trees built one by one, nodes beyond the record's end left out."""
    row = trained.rows[3]
    [response] = find_responses(row.loss_mask)
    replayed = replay_row(trained.drafter, trained.head, row, OPTIONS)
    for index, acceptor in enumerate(OPTIONS.acceptors):
        expected = num_nodes = 0.0
        for anchor in range(response.num_drafted):
            log_probs = _slot_log_probs(trained, row, response.first + anchor)
            ranked = log_probs.sort(dim=-1, descending=True, stable=True)
            tree = draft_tree(acceptor, 0, ranked.values, ranked.indices, COST)
            paths = [tree.path(node)[1:] for node in range(1, len(tree))]
            num_nodes += len(paths)
            scores = [
                float(ranked.values[range(len(path)), tree.child_ranks[path]].sum())
                for path in paths
                if len(path) <= response.num_drafted - anchor
            ]
            expected += float(torch.tensor(scores).exp().sum())
        assert replayed.sums.num_nodes[index] == num_nodes
        assert float(replayed.sums.predicted[index]) == pytest.approx(expected, rel=1e-4)
