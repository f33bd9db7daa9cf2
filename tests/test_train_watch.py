"""What an evaluation during training logs: the same numbers as decoding by hand, with names and units; ranks; resume."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from train_runs import ONE_RANK, make_config

from configs.schema import Config
from data.features import FeatureRow, open_features
from ddtree.build import build_tree
from drafter.folder import load_drafter, resolve_checkpoint
from evaluation.scores import find_responses, slot_states
from evaluation.sums import BIN_EDGES
from target.head import load_target_head
from train.engine import join_process_group
from train.loop import train_drafter
from train.tracking import METRICS, TIMES, is_metric

BUDGET = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    join_process_group(ONE_RANK)
    config = make_config(tmp_path_factory.mktemp("watched"), "train.steps=12", "train.eval_every=6")
    train_drafter(config, ONE_RANK)
    return config


def evaluations(config: Config) -> list[dict[str, Any]]:
    lines = (config.run.folder / "logs" / "train.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "validation/chain_acceptance" in line]


class ByHand:
    """One anchor after another, one dictionary of prefixes a tree: nothing of the batched replay is used."""

    def __init__(self, config: Config):
        self.emitted: dict[str, list[int]] = {"chain": [], "tree": []}
        self.survived: dict[str, Counter[int]] = {"chain": Counter(), "tree": Counter()}
        self.recalled: Counter[tuple[int, int]] = Counter()
        self.labelled: Counter[int] = Counter()
        self.nodes: list[tuple[float, bool]] = []
        features = open_features(config.run.folder / "features")
        folder = resolve_checkpoint(config.run.folder / "checkpoints", "last")
        self.drafter = load_drafter(folder, torch.device("cpu"), torch.float32).eval()
        self.head = load_target_head(features.checked_head(), torch.device("cpu"), torch.float32)
        for entry in features.of_split("validation"):
            self.add_row(features.read(entry))

    @torch.no_grad()
    def add_row(self, row: FeatureRow) -> None:
        for response in find_responses(row.loss_mask):
            record = row.input_ids[response.first : response.first + response.num_drafted + 1]
            accepted: dict[str, list[int]] = {"chain": [], "tree": []}
            for anchor in range(response.num_drafted):
                position = torch.tensor([response.first + anchor])
                hidden = slot_states(self.drafter, self.head, row, position)[0]
                log_probs = (hidden @ self.head.head.T).log_softmax(-1)
                for name, count in self.add_anchor(log_probs, record[anchor:].tolist()).items():
                    accepted[name].append(count)
            for name, counts in accepted.items():
                place = 0
                while place < response.num_drafted:
                    step = min(counts[place] + 1, response.num_drafted - place)
                    self.emitted[name].append(step)
                    place += step

    def add_anchor(self, log_probs: torch.Tensor, record: list[int]) -> dict[str, int]:
        """log_probs (L, V); record: the anchor and what follows. How many tokens chain and tree accept."""
        gold = record[1 : len(log_probs) + 1]
        found = log_probs.topk(BUDGET)
        tree = build_tree(record[0], found.values, found.indices, BUDGET)
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, len(tree.parents)):
            paths[node] = (*paths[int(tree.parents[node])], int(tree.tokens[node]))
            if len(paths[node]) <= len(gold):
                prob = 1.0
                for slot, token in enumerate(paths[node]):
                    prob *= float(log_probs[slot, token].exp())
                self.nodes.append((prob, list(paths[node]) == gold[: len(paths[node])]))
        prefixes = set(paths.values())
        depths = range(1, len(gold) + 1)
        chain = [k for k in depths if log_probs[:k].argmax(-1).tolist() == gold[:k]]
        inside = [k for k in depths if tuple(gold[:k]) in prefixes]
        for k in depths:
            self.labelled[k] += 1
            rank = int((log_probs[k - 1] > log_probs[k - 1, gold[k - 1]]).sum())
            self.recalled.update((top, k) for top in (1, 4, 16, 64) if rank < top)
        self.survived["chain"].update(chain)
        self.survived["tree"].update(inside)
        return {"chain": len(chain), "tree": len(inside)}


def test_an_evaluation_says_what_decoding_by_hand_says(trained: Config) -> None:
    line, by_hand = evaluations(trained)[-1], ByHand(trained)
    names = {"chain": "chain", "tree": f"tree_{BUDGET}"}
    for key, name in names.items():
        emitted = by_hand.emitted[key]
        assert len(emitted) > 10
        for number in range(1, 6):
            share = emitted.count(number) / len(emitted)
            assert line[f"walk/{name}_emits_{number:02d}"] == pytest.approx(share)
        for depth in range(1, 5):
            share = by_hand.survived[key][depth] / by_hand.labelled[depth]
            assert line[f"survival/{name}_depth_{depth:02d}"] == pytest.approx(share)
    for top in (1, 4, 16, 64):
        for slot in range(1, 5):
            share = by_hand.recalled[top, slot] / by_hand.labelled[slot]
            assert line[f"recall/top_{top}_slot_{slot:02d}"] == pytest.approx(share)
    assert line["calibration/ece"] == pytest.approx(calibration_error(by_hand.nodes), abs=1e-6)


def calibration_error(nodes: list[tuple[float, bool]]) -> float:
    """Sum over bins of |nodes expected right - nodes right|, over all nodes."""
    error = 0.0
    for low, high in itertools.pairwise(BIN_EDGES):
        inside = [
            (p, right) for p, right in nodes if low <= p < high or (high == 1.0 and p >= high)
        ]
        error += abs(sum(p for p, _ in inside) - sum(right for _, right in inside))
    return error / len(nodes)


def test_the_walk_is_the_acceptance_length_of_the_same_passes(trained: Config) -> None:
    """Shares sum to 1, and their mean is the micro mean; with prompts as long as these it is near the macro mean."""
    for line in evaluations(trained):
        for name, acceptance in (
            ("chain", "chain_acceptance"),
            (f"tree_{BUDGET}", f"tree_acceptance_{BUDGET}"),
        ):
            shares = {n: line[f"walk/{name}_emits_{n:02d}"] for n in range(1, 6)}
            assert sum(shares.values()) == pytest.approx(1)
            mean = sum(n * share for n, share in shares.items())
            assert mean == pytest.approx(line[f"validation/{acceptance}"], rel=0.25)


def test_training_writes_its_page_with_what_the_run_is(trained: Config) -> None:
    page = (trained.run.folder / "logs" / "training.html").read_text()
    assert "step 12 of 12" in page
    last = evaluations(trained)[-1]
    assert f"{last['validation/chain_acceptance']:.2f}" in page
    about = json.loads((trained.run.folder / "logs" / "run.json").read_text())
    assert about["settings"]["train.tree_budget"] == BUDGET
    assert about["name"] == "tiny"


def test_every_logged_name_has_a_unit_and_every_unit_a_name(trained: Config) -> None:
    lines = (trained.run.folder / "logs" / "train.jsonl").read_text().splitlines()
    logged = {name for line in map(json.loads, lines) for name in line} - {"step"}
    assert all(is_metric(name) for name in logged)
    assert not is_metric("train/loss_3")
    assert not is_metric("survival/tree_x_depth_01")
    assert set(METRICS) >= TIMES
