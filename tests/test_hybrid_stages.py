"""All five stages on a random Gated-DeltaNet hybrid: labels, features, training, live and replayed trees, the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HYBRID

from common.distributed import Ranks
from common.files import read_json
from configs.schema import Config
from data.build import build_corpus
from data.corpus import iter_corpus, read_corpus_manifest
from data.features import open_features
from evaluation.inputs import find_drafter
from evaluation.lossless import run_lossless
from evaluation.stage import Work, plan_work, run_evaluation
from export.stage import export_drafter
from extract.run import run_extract
from target.load import Target
from train.loop import train_drafter

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]
ONE_RANK = Ranks(0, 1, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def run(tiny_config: MakeConfig) -> tuple[Config, Work, dict[str, Any]]:
    config = tiny_config(HYBRID)
    build_corpus(config, ONE_RANK)
    run_extract(config, ONE_RANK, ignore_disk=True)
    train_drafter(config, ONE_RANK)
    work = plan_work(config, ONE_RANK, find_drafter(config, None))
    report = run_evaluation(work)
    assert report is not None
    return config, work, report


def test_labels_are_each_prompts_own_greedy_answer(
    run: tuple[Config, Work, dict[str, Any]], tiny_target: MakeTarget
) -> None:
    """Batched and left-padded when made; here every response token is the argmax of one plain forward of its row."""
    target, folder = tiny_target(HYBRID), run[0].run.folder / "corpus"
    for row in iter_corpus(folder, read_corpus_manifest(folder)):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)[None]
        chosen = target.model(ids).logits[0, :-1].argmax(-1)
        written = torch.tensor(row.loss_mask[1:])
        assert torch.equal(chosen[written], ids[0, 1:][written])


def test_features_are_the_layers_own_outputs(
    run: tuple[Config, Work, dict[str, Any]], tiny_target: MakeTarget
) -> None:
    target, features = tiny_target(HYBRID), open_features(run[0].run.folder / "features")
    for entry in features.of_split("train")[:6]:
        row = features.read(entry)
        hidden = target.model(row.input_ids[None].long(), output_hidden_states=True).hidden_states
        wanted = torch.stack([hidden[i + 1][0] for i in (1, 2, 4)], dim=1)  # (S, D, H)
        torch.testing.assert_close(row.features, wanted, rtol=1e-4, atol=2e-4)


def test_replay_says_what_live_decoding_does(run: tuple[Config, Work, dict[str, Any]]) -> None:
    parity = run[2]["parity"]
    assert parity["num_equal"] == parity["num_passes"] > 0


def test_every_acceptor_gives_the_targets_own_tokens(
    run: tuple[Config, Work, dict[str, Any]],
) -> None:
    result = run_lossless(run[1], [run[1].source], num_prompts=3)
    assert result is not None
    assert result["num_equal"] == result["num_prompts"] == 3


def test_the_export_names_the_hybrids_taps_and_gives_the_same_logits(
    run: tuple[Config, Work, dict[str, Any]],
) -> None:
    exported = export_drafter(run[0])
    config = read_json(Path(exported.folder) / "config.json", "")
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert config["num_target_layers"] == 6
