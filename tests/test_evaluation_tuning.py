"""Temperatures are the minimum of the held-out loss; costs are measured once; both are kept and read by every run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from evaluation_cases import Case, make_case

from configs.schema import Config, EvaluationSection
from data.features import FeatureRow, FeatureSet
from ddtree.build import build_tree
from drafter.head import sparse_log_probs
from evaluation.calibration import BOUND, fit_temperatures
from evaluation.costs import CostPoint, MeasuredCost, measure_costs, read_costs, rounds_needed
from evaluation.decode import make_proposer
from evaluation.drafting import DrafterProposer, slot_temperatures
from evaluation.replay import ReplayOptions, replay_row
from evaluation.scores import SlotScores, find_responses, score_anchors
from evaluation.tuning import Tuning, TuningFiles, fit_on_validation, settle
from target.head import TargetHead
from target.load import Target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]


@pytest.fixture(scope="module")
def trained(tiny_config: MakeConfig, tiny_target: MakeTarget) -> Case:
    config = tiny_config("llama", ["drafter.block_size=6"])
    return make_case(config, tiny_target("llama"), num_prompts=5, steps=40)


BUDGET = 6


def loss_at(case: Case, temperatures: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """(L,) mean negative log-likelihood a slot at `temperatures`, by replay's own scores, over the anchors whose recorded
    prefix is a node of the tree at temperatures `reach` (which a heap finds anew)."""
    total, counts = torch.zeros(5, dtype=torch.float64), torch.zeros(5)
    for row in case.rows:
        for response in find_responses(row.loss_mask):
            anchors = range(response.num_drafted)
            with torch.no_grad():
                scores, shape = (
                    score_anchors(case.drafter, case.head, row, response, anchors, BUDGET, t)
                    for t in (temperatures, reach)
                )
            for n in range(len(anchors)):
                alive = 1 + accepted_by_heap(shape, n)  # slots the walk gets to
                known = min(alive, int(scores.num_gold[n]))
                total[:known] -= scores.gold_log_probs[n, :known].double()
                counts[:known] += 1
    return total / counts


def accepted_by_heap(scores: SlotScores, anchor: int) -> int:
    log_probs = scores.top_log_probs[anchor]
    places = torch.arange(log_probs.shape[1]).expand_as(log_probs)
    tree = build_tree(0, log_probs, places, BUDGET)
    node, depth = 0, 0  # the root
    while depth < int(scores.num_gold[anchor]):
        wanted = int(scores.gold_child_ranks[anchor, depth])
        children = [i for i in range(1, len(tree)) if tree.parents[i] == node]
        found = [i for i in children if tree.tokens[i] == wanted]
        if not found:
            break
        node, depth = found[0], depth + 1
    return depth


def test_fit_is_the_minimum_over_the_slots_that_its_own_trees_reach(trained: Case) -> None:
    fit = fit_temperatures(trained.drafter, trained.head, trained.rows, 999, BUDGET)
    best = torch.tensor(fit.temperatures)
    least = loss_at(trained, best, best)
    torch.testing.assert_close(least, torch.tensor(fit.nll_after).double(), rtol=1e-4, atol=1e-5)
    before = loss_at(trained, torch.ones(5), best)
    torch.testing.assert_close(before, torch.tensor(fit.nll_before).double(), rtol=1e-4, atol=1e-5)
    assert (least < before).all(), "the case needs a drafter that is badly calibrated"
    for factor in (0.97, 1.03):
        assert (loss_at(trained, best * factor, best) > least).all()
    assert max(fit.temperatures) < BOUND
    assert min(fit.temperatures) > 1 / BOUND
    falling = list(fit.num_tokens)
    assert falling == sorted(falling, reverse=True)
    everything = sum(row.loss_mask.sum() - 1 for row in trained.rows)
    assert fit.num_tokens[0] == everything > fit.num_tokens[2], "the case needs walks that end"


def test_a_scaled_head_gives_scaled_temperatures(trained: Case) -> None:
    """Logits times c have their minimum at temperature times c, and the same loss there."""
    fit = fit_temperatures(trained.drafter, trained.head, trained.rows, 50, BUDGET)
    scaled = TargetHead(trained.head.embedding, trained.head.head * 3)
    again = fit_temperatures(trained.drafter, scaled, trained.rows, 50, BUDGET, head_chunk_rows=7)
    assert again.temperatures == pytest.approx([3 * t for t in fit.temperatures], rel=1e-3)
    assert again.nll_after == pytest.approx(fit.nll_after, rel=1e-4)


def test_a_slot_without_tokens_keeps_temperature_one_and_no_response_is_refused(
    trained: Case,
) -> None:
    row = trained.rows[3]
    first = int(row.loss_mask.int().argmax())
    short = row.loss_mask & (torch.arange(len(row.loss_mask)) < first + 3)
    rows = [dataclasses.replace(row, loss_mask=short)]
    fit = fit_temperatures(trained.drafter, trained.head, rows, 50, 64)
    assert fit.num_tokens[0] == 2
    assert fit.num_tokens[1] <= 1, "only where the walk gets to it"
    assert fit.num_tokens[2:] == (0, 0, 0)
    assert fit.temperatures[2:] == (1.0, 1.0, 1.0)
    nothing = [dataclasses.replace(row, loss_mask=torch.zeros_like(row.loss_mask))]
    with pytest.raises(ValueError, match="no row has a response of two tokens"):
        fit_temperatures(trained.drafter, trained.head, nothing, 50, 64)


def test_temperatures_a_row_are_those_of_full_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=generator).double().requires_grad_()
    head = torch.randn(11, 8, generator=generator).double()
    ids, t = torch.randint(11, (7, 3), generator=generator), torch.linspace(0.3, 2, 7).double()
    full = (hidden @ head.T / t[:, None]).log_softmax(-1).gather(1, ids)
    found = sparse_log_probs(hidden, head, ids, 4, 3, t).log_probs
    torch.testing.assert_close(found, full, rtol=0, atol=1e-12)
    wanted, got = (torch.autograd.grad(x.square().sum(), hidden)[0] for x in (full, found))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_slot_temperatures_reach_the_trees_and_leave_the_chain_alone(trained: Case) -> None:
    """A slot's order of tokens does not depend on its temperature: the chain is the same, the trees are not."""
    row, fitted = trained.rows[4], (0.4, 0.8, 1.5, 3.0, 6.0)
    plain, warm = (
        replay_row(trained.drafter, trained.head, row, ReplayOptions((4, 16), temperature))
        for temperature in (1.0, fitted)
    )
    assert plain.passes["chain"] == warm.passes["chain"]
    assert not torch.equal(plain.sums.predicted, warm.sums.predicted)
    both = replay_row(
        trained.drafter,
        trained.head,
        row,
        ReplayOptions((4, 16), fitted, compares_unfitted=True),
    )
    assert both.unfitted is not None
    assert torch.equal(both.unfitted.flat(), plain.sums.flat())
    assert both.unfitted_passes == plain.passes
    assert torch.equal(both.sums.flat(), warm.sums.flat())


def test_live_blocks_use_a_temperature_a_slot(trained: Case) -> None:
    row, fitted = trained.rows[4], (0.4, 0.8, 1.5, 3.0, 6.0)
    first = int(row.loss_mask.int().argmax())
    proposer = DrafterProposer(trained.drafter, trained.head, fitted, 64)
    proposer.start(0, row.features[:first])
    log_probs, ids = proposer.top([int(row.input_ids[first])], 8)
    [response] = find_responses(row.loss_mask)
    with torch.no_grad():
        scores = score_anchors(
            trained.drafter, trained.head, row, response, range(1), 8, torch.tensor(fitted)
        )
    torch.testing.assert_close(log_probs[0], scores.top_log_probs[0], rtol=1e-4, atol=1e-4)
    probs = proposer.probs([int(row.input_ids[first])])
    torch.testing.assert_close(probs[0].gather(1, ids[0]), log_probs[0].exp(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [(1.0, 2.0), (1.0, 1.0, 0.0, 1.0, 1.0), -1.0])
def test_wrong_temperatures_are_refused(given: float | tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="give one positive number, or one for each of 5 slots"):
        slot_temperatures(given, 5)


def cost_of(*seconds: float) -> MeasuredCost:
    points = [
        CostPoint(nodes, 0.1, 0.01, value, 0.02, 0.03)
        for nodes, value in zip((0, 1, 2, 4), seconds, strict=True)
    ]
    return MeasuredCost(tuple(points), 1, "here")


def test_a_round_is_the_draft_and_the_fit_of_the_rest_by_hand() -> None:
    cost = cost_of(1.0, 1.1, 1.2, 1.4)
    assert cost.plain_step == pytest.approx(1.05)
    assert cost.round_cost().seconds == pytest.approx([1.16, 1.26, 1.36, 1.46, 1.56])
    assert cost.round_seconds().of(3) == pytest.approx(1.46)


def test_costs_that_wobble_are_rising_and_convex_after_the_fit() -> None:
    cost = cost_of(1.0, 1.3, 1.2, 1.25).round_cost()
    steps = [b - a for a, b in zip(cost.seconds, cost.seconds[1:], strict=False)]
    assert min(steps) >= 0
    assert all(b > a - 1e-12 for a, b in itertools.pairwise(steps))


def test_measured_costs_have_every_size_and_survive_their_file(
    trained: Case, tmp_path: Path
) -> None:
    prompt = trained.ids(2)
    settings = trained.settings(max_new_tokens=rounds_needed(6))
    proposer = make_proposer(trained.verifier, trained.drafter, trained.head, [prompt], settings)
    found = measure_costs(trained.verifier, proposer, prompt, 6)
    assert [point.num_nodes for point in found.points] == [0, 1, 2, 4, 6]
    assert all(point.verify > 0 < point.draft for point in found.points)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(found.to_json()))
    assert read_costs(path) == found
    assert read_costs(path).round_cost().max_budget == 6


@pytest.mark.parametrize("text", ["{", "{}", '{"points": [{"num_nodes": 0}]}'])
def test_a_broken_cost_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*set evaluation.cost_file"):
        read_costs(path)


@pytest.mark.parametrize(
    "change",
    [
        {"verify": math.nan},
        {"verify": math.inf},
        {"verify": 0.0},
        {"draft": -9.0},
        {"build": math.nan},
        {"num_nodes": 1.5},
        {"num_nodes": 2},
        {"num_nodes": 9000},
    ],
    ids=str,
)
def test_costs_that_nothing_can_have_are_one_line(change: dict[str, float], tmp_path: Path) -> None:
    value = cost_of(1.0, 1.1, 1.2, 1.4).to_json()
    value["points"][1] |= change
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=f"{path}.*set evaluation.cost_file"):
        read_costs(path)


@pytest.mark.parametrize("text", ['["a"]', "[NaN, 1]", '"12"', "[-1, 2]", "[0]", "3"])
def test_temperatures_that_nothing_can_have_are_one_line(text: str, tmp_path: Path) -> None:
    files = TuningFiles(tmp_path, EvaluationSection(acceptors=("tree",), drafter_temperature="fit"))
    files.temperatures.write_text(f'{{"temperatures": {text}}}')
    with pytest.raises(ValueError, match=f"{files.temperatures}.*remove it"):
        files.read()


def test_a_fit_looks_at_no_more_anchors_than_asked_for(
    trained: Case,
) -> None:
    rows = trained.rows[:3]

    class Features:
        def of_split(self, split: str) -> list[FeatureRow]:
            assert split == "validation"
            return rows

        def read(self, entry: FeatureRow) -> FeatureRow:
            return entry

    for num_anchors, num_rows in ((1, 1), (4, 1), (7, 1), (16, 2), (30, 3)):
        fit = fit_on_validation(
            trained.drafter, trained.head, cast(FeatureSet, Features()), num_anchors, 64
        )
        assert 0 < max(fit["num_tokens"]) <= num_anchors
        # not one anchor of many rows: that one would be the response's start
        assert fit["fitted_on"]["num_rows"] == num_rows


def test_what_was_settled_is_never_settled_again(tmp_path: Path) -> None:
    section = EvaluationSection(drafter_temperature="fit")
    files, made = TuningFiles(tmp_path, section), []

    def fit() -> dict[str, object]:
        made.append("fit")
        return {"temperatures": [1.0, 2.0]}

    def measure(tuning: Tuning) -> MeasuredCost:
        made.append(tuning.drafter_temperature)
        return cost_of(1.0, 1.1, 1.2, 1.4)

    settle(files, fit, measure)
    before = files.read()
    settle(files, fit, measure)
    assert made == ["fit", (1.0, 2.0)], "costs are measured with the fitted temperatures, once"
    assert files.read() == before == Tuning((1.0, 2.0), cost_of(1.0, 1.1, 1.2, 1.4).round_cost())


def test_a_recipe_may_bring_costs_or_need_none(tmp_path: Path) -> None:
    given = tmp_path / "other.json"
    given.write_text(json.dumps(cost_of(1.0, 1.1, 1.2, 1.4).to_json()))
    brought = TuningFiles(tmp_path / "run", EvaluationSection(cost_file=given))
    none = TuningFiles(tmp_path / "run", EvaluationSection(acceptors=("chain", "tree")))

    def never(*_: object) -> MeasuredCost:
        pytest.fail("nothing is missing")

    for files in (brought, none):
        settle(files, dict, never)
    assert brought.read().cost == cost_of(1.0, 1.1, 1.2, 1.4).round_cost()
    assert none.read() == Tuning(1.0, None)
