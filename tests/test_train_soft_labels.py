"""Soft labels from the target's head to the loss: what is stored, what is read, what a slot gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_extract_run import ONE, make_rows, write_rows
from train_runs import ONE_RANK, losses, make_config

from configs.load import load_config
from data.feature_shards import (
    CHUNK_TOKENS,
    FeatureLayout,
    FeatureRow,
    open_shard,
    read_row,
    write_shard,
)
from data.features import open_features
from data.soft_labels import SoftLabels
from extract.plan import plan_extract
from extract.run import run_extract
from target.load import load_target
from target.taps import forward_with_taps
from train.anchors import sample_anchors
from train.batches import collate
from train.engine import join_process_group
from train.loop import train_drafter
from train.vocabulary import training_head


@pytest.mark.parametrize("num_tokens", [1, 5, CHUNK_TOKENS + 1])
def test_a_shard_gives_back_the_labels_it_was_given(tmp_path: Path, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 248_320, (num_tokens, 3), generator=generator)
    labels = SoftLabels(ids, torch.randn(num_tokens, 3, generator=generator))
    row = FeatureRow(
        "a", "s", "t", "train", ids[:, 0], ids[:, 0] > 9, torch.zeros(num_tokens, 1, 4), labels
    )
    layout = FeatureLayout("fp32", 1, 4, num_soft_labels=3)
    write_shard(tmp_path / "shard", [row], layout)
    read = read_row(open_shard(tmp_path / "shard"), 0, layout).soft_labels
    assert read is not None
    assert torch.equal(read.token_ids, ids)
    assert torch.equal(read.log_probs, labels.log_probs)
    with pytest.raises(ValueError, match="target_top_ids"):
        read_row(open_shard(tmp_path / "shard"), 0, replace(layout, num_soft_labels=4))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_extract_stores_the_targets_own_distribution_of_every_response_token(
    tiny_config, temperature: float
) -> None:
    config = tiny_config(
        "llama",
        [
            "data.responses.generate=false", "extract.soft_labels=5", "extract.codec=fp32",
            f"extract.soft_label_temperature={temperature}",
        ],
    )  # fmt: skip
    rows = make_rows(6)
    write_rows(config, rows)
    run_extract(config, ONE)
    features, target = (
        open_features(config.run.folder / "features"),
        load_target(config.target, "cpu"),
    )
    for entry, row in zip(features.entries, rows, strict=True):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        output = forward_with_taps(
            target, ids[None], torch.tensor([len(ids)]), config.drafter.target_layer_ids, True
        )
        assert output.last_hidden is not None
        logits = output.last_hidden[0].float() @ target.lm_head.float().T / temperature
        wanted = logits.log_softmax(-1).topk(5)
        read = features.read(entry)
        found = read.soft_labels
        assert found is not None
        generated = torch.tensor(row.loss_mask)
        assert torch.equal(features.read_soft_token_ids(entry), found.token_ids)
        assert not found.log_probs[~generated].any()
        after = generated[1:]
        assert torch.equal(found.token_ids[1:][after], wanted.indices[:-1][after])
        # padded into a batch with others, which rounds otherwise
        torch.testing.assert_close(
            found.log_probs[1:][after], wanted.values[:-1][after], rtol=1e-4, atol=1e-4
        )


def test_the_plan_counts_their_bytes(tiny_config) -> None:
    plain, soft = (
        plan_extract(tiny_config("llama", [f"extract.soft_labels={kept}"])) for kept in (0, 16)
    )
    assert soft.stored_bytes_per_token("bf16") == plain.stored_bytes_per_token("bf16") + 128


def test_a_slot_gets_the_labels_of_its_own_token() -> None:
    """Entry t of a row holds 10 t and 10 t + 1: so does the slot that predicts token t."""
    place = torch.arange(12)
    labels = SoftLabels(
        10 * place[:, None] + torch.arange(2), -place[:, None].float().expand(-1, 2)
    )
    mask = (place >= 3) & (place != 8)
    row = FeatureRow("a", "s", "t", "train", place, mask, torch.zeros(12, 1, 4), labels)
    anchors = sample_anchors(row.input_ids, mask, 4, 99, 0, 0, "a")
    batch = collate([row], [anchors], 12)
    assert batch.soft is not None
    assert torch.equal(batch.soft.token_ids[..., 0], 10 * batch.labels)
    assert torch.equal(
        batch.soft.token_ids[..., 1][batch.label_mask], 10 * batch.labels[batch.label_mask] + 1
    )
    assert torch.equal(batch.soft.log_probs[..., 0], -batch.labels.float())


@pytest.mark.parametrize("loss", ["kl", "tv", "lk", "{tree: 0.5, kl: 0.5}", "tree_surrogate"])
def test_losses_with_soft_labels_train(tmp_path: Path, loss: str) -> None:
    join_process_group(ONE_RANK)
    config = make_config(
        tmp_path, f"train.loss={loss}", "train.soft_label_share=0.5", "extract.soft_labels=4",
        "train.steps=16", "train.vocabulary=corpus", "train.surrogate_budgets=[4, 8]",
    )  # fmt: skip
    train_drafter(config, ONE_RANK)
    curve = losses(config.run.folder)
    assert curve[-1] < 0.8 * curve[5]


def test_the_corpus_vocabulary_holds_the_soft_labels_tokens(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, "train.loss=kl", "extract.soft_labels=4", "train.vocabulary=corpus"
    )
    features = open_features(config.run.folder / "features")
    entries = features.of_split("train")
    head = torch.arange(48.0)[:, None].expand(48, 32)
    found = training_head(head, features, entries, config.train)
    for entry in entries:
        soft = features.read(entry).soft_labels
        assert soft is not None
        assert torch.equal(found.weight[found.labels(soft.token_ids), 0].long(), soft.token_ids)


def test_features_without_soft_labels_are_refused_by_name(tmp_path: Path) -> None:
    make_config(tmp_path)
    config = load_config(tmp_path / "tiny.yaml", ["train.loss=kl", "extract.soft_labels=4"])
    with pytest.raises(ValueError, match=r"extract\.soft_labels"):
        train_drafter(config, ONE_RANK)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("extract.soft_label_temperature=0.5", r"soft_label_temperature=1\.0, this run has 0\.5"),
        ("extract.soft_labels=8", r"soft_labels=4, this run has 8"),
        ("target.model=another", r"target\.model='no-target', this run has 'another'"),
        ("target.revision=abc", r"target\.revision=None, this run has 'abc'"),
    ],
)
def test_features_that_the_recipe_no_longer_describes_are_refused(
    tmp_path: Path, override: str, message: str
) -> None:
    make_config(tmp_path, "extract.soft_labels=4")
    overrides = ["train.loss=kl", "extract.soft_labels=4", override]
    with pytest.raises(ValueError, match=message):
        train_drafter(load_config(tmp_path / "tiny.yaml", overrides), ONE_RANK)
