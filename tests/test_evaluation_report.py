"""report.json's numbers by their definitions: from counts, from brute force, from a drafter whose beliefs are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from report_cases import (
    OPTIONS,
    Made,
    decode_live,
    draw_scores,
    empty_sums,
    make_evaluation,
    replay_scores,
)

from ddtree.build import build_trees
from evaluation.acceptance import measure_acceptance
from evaluation.child_ranks import count_child_ranks, replay_child_ranks
from evaluation.comparison import compare_prompts
from evaluation.prompt_records import (
    by_kind,
    read_prompt_records,
    write_prompt_records,
)
from evaluation.records import live_from_json, live_to_json, replay_from_json, replay_to_json
from evaluation.replay import RowReplay
from evaluation.report import build_report
from evaluation.speed import RoundSeconds, modelled_rows
from evaluation.sums import BIN_EDGES

Row = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> Made:
    return make_evaluation(has_fit=True)


@pytest.fixture(scope="module")
def report(made: Made) -> Row:
    return build_report(made.identity, made.measured, made.measured.prompt_records())


def pick(rows: list[Row], **wanted: Any) -> Row:
    [found] = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return found


def test_json_and_records_read_back_as_they_were(made: Made, report: Row, tmp_path: Path) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    records = made.measured.prompt_records()
    entry = write_prompt_records(tmp_path, records)
    assert read_prompt_records(tmp_path, entry) == records
    row = made.measured.replayed[3]
    again = replay_from_json(json.loads(json.dumps(replay_to_json(row))))
    assert (again.passes, again.child_ranks) == (row.passes, row.child_ranks)
    torch.testing.assert_close(again.sums.flat(), row.sums.flat(), rtol=0, atol=0)
    assert again.unfitted is not None
    live = made.measured.live[0]
    assert live_from_json(json.loads(json.dumps(live_to_json(live)))) == live


def test_rows_are_what_the_prompt_records_give(made: Made, report: Row) -> None:
    kinds = by_kind(made.measured.prompt_records())
    for row in report["rows"]:
        [records] = [found for kind, found in kinds.items() if dataclasses.asdict(kind).items() <= row.items()]  # fmt: skip
        own = [r.as_passes for r in records if row["task"] in ("all", r.task)]
        measured = measure_acceptance(own)
        assert (row["acceptance_macro"], row["num_passes"]) == (measured.macro, measured.num_passes)
        assert tuple(row["ci95"]) == measured.ci95


def test_gains_are_paired_with_the_chain_of_the_same_mode(made: Made, report: Row) -> None:
    kinds = {(k.mode, k.acceptor, k.budget): [r.as_passes for r in found] for k, found in by_kind(made.measured.prompt_records()).items()}  # fmt: skip
    for row in report["gain"]:
        chain, own = kinds[row["mode"], "chain", None], kinds[row["mode"], row["acceptor"], row["budget"]]  # fmt: skip
        compared = compare_prompts(chain, own)
        assert compared is not None
        assert row["difference"] == compared.difference
    drafted = {k[:2] for k in kinds if k[1] not in ("plain", "chain")}
    assert {(row["mode"], row["acceptor"]) for row in report["gain"]} == drafted


def test_shares_of_choices_sum_to_one_and_count_the_drafted_tokens(made: Made, report: Row) -> None:
    for row in report["child_ranks"]:
        assert sum(row["share"]) == pytest.approx(1)
        assert sum(row["counts"]) == row["num_tokens"]
        records = [r for r in made.measured.prompt_records() if dataclasses.asdict(r.kind).items() <= row.items()]  # fmt: skip
        emitted = sum(sum(record.passes) for record in records)
        num_passes = sum(len(record.passes) for record in records)
        # every pass but one that the response's end cuts also emits its bonus token
        cut = sum(len(ranks) == n for r in records for ranks, n in zip(r.child_ranks, r.passes, strict=True))  # fmt: skip
        assert row["num_tokens"] == emitted - (num_passes - cut)
    chain = pick(report["child_ranks"], mode="replay", acceptor="chain")
    assert chain["share"] == [1.0]
    tree = pick(report["child_ranks"], mode="replay", acceptor="tree", budget=16)
    assert len(tree["share"]) > 3


def test_choices_of_a_replayed_pass_by_hand() -> None:
    gold = [[0, 2, 9], [5, 0, 0], [1, 1, 1], [0, 0, 0], [3, 0, 0]]
    # anchor 0 accepts 2 of 3 and emits 3; anchor 3 accepts 2 where only 2 tokens are left
    assert replay_child_ranks(gold, [2, 0, 1, 2, 1], [3, 2]) == [[0, 2], [0, 0]]
    assert replay_child_ranks(gold, [0, 1, 0, 0, 0], [1, 2, 1, 1]) == [[], [5], [], []]
    assert count_child_ranks([[0, 2], [], [0]]) == [2, 0, 1]
    assert count_child_ranks([[], []]) == []


@pytest.mark.parametrize("flatness", [1.0, 2.0])
def test_a_true_drafter_is_called_calibrated_and_a_sharper_one_over_confident(
    flatness: float,
) -> None:
    """Records drawn from the drafter's own distribution: what it expects of every acceptor is what happens."""
    sums, parts = empty_sums(), []
    for seed in range(40):
        row = replay_scores(f"p{seed}", "t", draw_scores(1000 + seed, 60, flatness))
        sums += row.sums
        parts.append(row)
    made = make_evaluation()
    measured = dataclasses.replace(made.measured, replayed=parts, sums=sums, live=[])
    found = build_report(made.identity, measured, measured.prompt_records())["calibration"]
    assert len(found["accepted_per_anchor"]) == len(OPTIONS.acceptors)
    for row in found["accepted_per_anchor"]:
        low, high = row["ratio_ci95"]
        assert low < row["ratio"] < high
        if flatness == 1:
            # 2400 anchors that accept 0.4 to 1.5 tokens each
            assert row["ratio"] == pytest.approx(1, abs=0.09), row
        else:
            assert low > 1.3, row
    assert found["ece"] < 0.01 if flatness == 1 else found["ece"] > 0.03


def test_the_calibration_error_by_hand(made: Made) -> None:
    sums = empty_sums()
    sums.num_anchors += 10
    sums.bins[BIN_EDGES.index(0.5)] = torch.tensor([4.0, 2.2, 1.0])  # mean 0.55, 1/4 right
    sums.bins[BIN_EDGES.index(0.1)] = torch.tensor([16.0, 2.4, 4.0])  # mean 0.15, 1/4 right
    measured = dataclasses.replace(made.measured, sums=sums, replayed=[], live=[])
    found = build_report(made.identity, measured, [])["calibration"]
    assert found["ece"] == pytest.approx((4 * 0.3 + 16 * 0.1) / 20)
    assert [(row["low"], row["high"], row["num_nodes"]) for row in found["nodes"]] == [(0.1, 0.2, 16), (0.5, 0.6, 4)]  # fmt: skip


def test_bins_hold_every_node_that_can_be_judged_once(made: Made) -> None:
    sums = made.measured.sums
    largest = sums.acceptors.index("tree-16")
    assert sums.bins[:, 1].sum() == pytest.approx(float(sums.predicted[largest]))
    assert sums.bins[:, 2].sum() == float(sums.realised[largest])
    means = (sums.bins[:, 1] / sums.bins[:, 0]).tolist()
    for low, high, mean in zip(BIN_EDGES, BIN_EDGES[1:], means, strict=False):
        assert mean != mean or low - 1e-9 <= mean <= high + 1e-9


def test_nodes_beyond_the_records_end_are_neither_expected_nor_judged() -> None:
    """An anchor with one recorded token left: of its tree only the children of the root can be right."""
    scores = draw_scores(5, 1)
    assert scores.num_gold.tolist() == [1]
    sums = replay_scores("p", "t", scores).sums
    tree = build_trees(scores.top_log_probs, 16)
    children = tree.scores[0][tree.depths[0] == 1].double().exp()
    assert 0 < len(children) < 16
    assert sums.bins[:, 0].sum() == len(children)
    expected = sums.predicted[sums.acceptors.index("tree-16")]
    assert float(expected) == pytest.approx(float(children.sum()))
    chain = sums.predicted[sums.acceptors.index("chain")]
    assert float(chain) == pytest.approx(float(scores.top_log_probs[0, 0, 0].exp()))


def test_before_and_after_a_fit_stand_side_by_side(made: Made, report: Row) -> None:
    def doubled(row: RowReplay) -> RowReplay:
        unfitted = row.sums.with_flat(row.sums.flat())
        unfitted.predicted *= 2
        return dataclasses.replace(row, unfitted=unfitted)

    measured = dataclasses.replace(
        made.measured, replayed=[doubled(row) for row in made.measured.replayed]
    )
    after = build_report(made.identity, measured, measured.prompt_records())["calibration"]
    for now, before in zip(after["accepted_per_anchor"], after["unfitted"]["accepted_per_anchor"], strict=True):  # fmt: skip
        assert before["ratio"] == pytest.approx(2 * now["ratio"])
    assert after["nodes"] == report["calibration"]["nodes"]
    plain = make_evaluation()
    found = build_report(plain.identity, plain.measured, plain.measured.prompt_records())
    assert found["calibration"]["unfitted"] is None


def test_modelled_speed_by_hand() -> None:
    """A plain step of 10 ms; a round of 20 ms and 1 ms a node: 3 tokens a pass at 10 nodes are as fast as plain."""
    cost = RoundSeconds(0.010, tuple(0.020 + 0.001 * n for n in range(41)))
    rows = [
        {"acceptor": "tree", "budget": b, "acceptance_micro": length, "micro_ci95": [length - 1, length + 1]}
        for b, length in ((10, 3.0), (40, 4.5), (41, 9.0))
    ]  # fmt: skip
    found = modelled_rows(rows, [10.0, 39.5, 41.0], cost)
    assert [row["budget"] for row in found] == [10, 40], "nothing is said beyond what was measured"
    assert found[0]["speedup"] == pytest.approx(1.0)
    assert found[0]["ci95"] == pytest.approx([2 / 3, 4 / 3])
    assert found[1]["round_ms"] == pytest.approx(59.5)
    assert found[1]["speedup"] == pytest.approx(4.5 * 10 / 59.5)


def test_modelled_speed_is_that_of_all_tokens_over_all_passes(made: Made, report: Row) -> None:
    cost = made.measured.cost
    assert cost is not None
    rows = {
        (r["acceptor"], r["budget"]): r
        for r in report["rows"]
        if r["task"] == "all" and r["mode"] == "replay"
    }
    for row in report["modelled"]:
        micro = rows[row["acceptor"], row["budget"]]["acceptance_micro"]
        assert row["speedup"] == pytest.approx(1000 * micro * cost.plain_step / row["round_ms"])


def test_a_report_prices_every_acceptor_at_its_own_number_of_nodes(made: Made, report: Row) -> None:
    nodes = {(row["acceptor"], row["budget"]): row["num_nodes"] for row in report["modelled"]}
    assert nodes["chain", None] == 4
    assert [nodes["tree", b] for b in (2, 4, 8, 16)] == [2, 4, 8, 16]
    assert 0 < nodes["tree_cost", 16] < 16
    without = dataclasses.replace(made.measured, cost=None)
    assert build_report(made.identity, without, [])["modelled"] == []


def test_speed_is_of_decoding_alone_and_shares_sum_to_one(report: Row) -> None:
    live = [row for row in report["rows"] if row["mode"] == "live" and row["task"] == "all"]
    assert pick(live, acceptor="plain")["tokens_per_s"] == pytest.approx(100)
    for row in live:
        assert sum(row["stage_share"].values()) == pytest.approx(1)
        if row["acceptor"] != "plain":
            assert row["tokens_per_s"] == pytest.approx(row["acceptance_micro"] / 0.02)


def test_live_decodes_of_replayed_passes_give_the_same_rows(made: Made) -> None:
    replayed = made.measured.replayed
    measured = dataclasses.replace(made.measured, live=[decode_live(row) for row in replayed])
    report = build_report(made.identity, measured, measured.prompt_records())
    for row in report["rows"]:
        if row["mode"] == "replay":
            names = ("task", "acceptor", "budget", "temperature")
            twin = pick(report["rows"], mode="live", **{name: row[name] for name in names})
            for name in ("num_prompts", "num_passes", "acceptance_macro", "acceptance_micro", "ci95"):  # fmt: skip
                assert row[name] == twin[name]
    for row in report["side_by_side"]:
        assert row["live"] == row["replay"]
