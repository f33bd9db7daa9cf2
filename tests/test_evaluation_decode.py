"""Live decoding: the output is the target's own, for any drafter, and stops where the target would."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES
from evaluation_cases import MAX_NEW_TOKENS, Case, continuations, make_case

from configs.schema import Config
from evaluation.acceptors import CHAIN, Acceptor, tree_acceptor
from evaluation.clock import STAGES
from evaluation.decode import decode_plain, decode_with_tree
from evaluation.decoded import Decoded
from evaluation.scores import Response, score_anchors
from target.generate import Sampling
from target.load import Target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]
ACCEPTORS = (CHAIN, tree_acceptor(1), tree_acceptor(6), tree_acceptor(40))


@pytest.fixture(scope="module")
def trained(tiny_config: MakeConfig, tiny_target: MakeTarget) -> Case:
    config = tiny_config("llama", ["drafter.block_size=6"])
    return make_case(config, tiny_target("llama"), steps=90)


def decode(case: Case, index: int, acceptor: Acceptor, **changes: object) -> Decoded:
    return decode_with_tree(
        case.verifier,
        case.drafter,
        case.head,
        case.ids(index),
        acceptor,
        case.settings(**changes),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_for_a_random_drafter(
    family: str, tiny_config: MakeConfig, tiny_target: MakeTarget
) -> None:
    case = make_case(tiny_config(family), tiny_target(family), num_prompts=2, steps=0)
    for index, record in enumerate(case.records):  # the first prompt has one token
        assert decode_plain(case.verifier, case.ids(index), case.settings()).tokens == record
        for acceptor in (CHAIN, tree_acceptor(6)):
            assert decode(case, index, acceptor).tokens == record


def test_greedy_output_is_the_targets_for_a_drafter_that_is_often_right(trained: Case) -> None:
    means = {}
    for acceptor in ACCEPTORS:
        found = [decode(trained, index, acceptor) for index in range(len(trained.prompts))]
        assert [decoded.tokens for decoded in found] == trained.records
        passes = [count for decoded in found for count in decoded.passes]
        means[acceptor.key] = sum(passes) / len(passes)
    assert means["chain"] > 1.3, "the test needs accepted drafts"
    assert means["tree-1"] <= means["tree-6"] <= means["tree-40"]
    assert means["tree-40"] > means["chain"]


def test_passes_account_for_every_token_but_prefills(trained: Case) -> None:
    for acceptor in ACCEPTORS:
        decoded = decode(trained, 3, acceptor)
        assert sum(decoded.passes) == len(decoded.tokens) - 1
        anchors = [0, *itertools.accumulate(decoded.passes)][:-1]
        assert [record.anchor for record in decoded.records] == anchors
        assert set(decoded.seconds) == {"prefill", *STAGES}
        assert all(decoded.seconds[stage] > 0 for stage in ("draft", "build", "verify", "commit"))


def test_max_new_tokens_cuts_inside_the_tree(trained: Case) -> None:
    whole = decode(trained, 3, tree_acceptor(40))
    number = next(i for i, count in enumerate(whole.passes) if count > 2)
    limit = 1 + sum(whole.passes[:number]) + 1  # one token into that pass
    decoded = decode(trained, 3, tree_acceptor(40), max_new_tokens=limit)
    assert decoded.tokens == whole.tokens[:limit]
    assert decoded.passes == [*whole.passes[:number], 1]
    assert len(decoded.records[-1].accepted.nodes) > 1, "the walk itself went on"


def test_eos_inside_the_tree_ends_the_response(trained: Case) -> None:
    for index in range(len(trained.prompts)):
        whole = decode(trained, index, tree_acceptor(40))
        starts = [1, *(1 + total for total in itertools.accumulate(whole.passes))]
        for number, count in enumerate(whole.passes):
            token = whole.tokens[starts[number]]
            if count > 2 and token not in whole.tokens[: starts[number]]:
                decoded = decode(trained, index, tree_acceptor(40), eos_token_ids=(token,))
                assert decoded.tokens == whole.tokens[: starts[number] + 1]
                assert decoded.passes == [*whole.passes[:number], 1]
                return
    pytest.fail("no accepted draft begins with a new token; choose other prompts")


def test_a_response_of_prefills_token_alone_has_no_pass(trained: Case) -> None:
    first = trained.records[2][0]
    for changes in ({"max_new_tokens": 1}, {"eos_token_ids": (first,)}):
        decoded = decode(trained, 2, CHAIN, **changes)
        assert (decoded.tokens, decoded.passes) == ([first], [])


def test_the_drafters_context_is_what_a_full_forward_would_give(trained: Case) -> None:
    """Every tree of an incremental decode holds the chain that the record's own features draft at its anchor."""
    decoded = decode(trained, 5, CHAIN)
    row, first = trained.rows[5], len(trained.prompts[5])
    response = Response(first, len(decoded.tokens) - 1)
    with torch.no_grad():
        scores = score_anchors(
            trained.drafter, trained.head, row, response, range(response.num_drafted), 1
        )
    for record in decoded.records:
        num_gold = int(scores.num_gold[record.anchor])
        gold_first = (scores.gold_child_ranks[record.anchor, :num_gold] == 0).tolist()
        drafted = record.tree.tokens[1 : 1 + num_gold].tolist()
        recorded = decoded.tokens[record.anchor + 1 : record.anchor + 1 + num_gold]
        assert gold_first == [a == b for a, b in zip(drafted, recorded, strict=True)]


def test_sampled_output_has_the_targetscontinuations(trained: Case) -> None:
    """Chi-square of the first three tokens against the target's own probabilities, at temperature 1 and top-k 2."""
    sampling, runs = Sampling(1.3, 1.0, 2), 160
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(runs):
        decoded = decode(
            trained, 1, tree_acceptor(40), sampling=sampling, seed=seed, max_new_tokens=3
        )
        counts[tuple(decoded.tokens)] += 1
        accepted += sum(len(record.accepted.nodes) - 1 for record in decoded.records)
    assert accepted > runs / 10, "the test needs sampled tokens that were drafted"
    expected = continuations(trained.target, trained.prompts[1], sampling, 3)
    assert set(counts) <= set(expected)
    statistic = sum((counts[k] - runs * p) ** 2 / (runs * p) for k, p in expected.items())
    assert statistic < 24.3, counts  # 7 degrees of freedom, p = 0.001


def test_seeds_repeat_and_differ(trained: Case) -> None:
    sampling = Sampling(1.0)

    def sample(seed: int) -> list[int]:
        return decode(trained, 0, tree_acceptor(6), sampling=sampling, seed=seed).tokens

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1
    assert len(sample(1)) <= MAX_NEW_TOKENS
