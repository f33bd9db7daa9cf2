"""Training's softmax over the corpus' tokens: the same loss as a target whose vocabulary holds nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from train_runs import make_config

from data.features import open_features
from target.head import load_target_head
from train.vocabulary import training_head


def test_corpus_keeps_exactly_the_rows_tokens_and_their_own_head_rows(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    features = open_features(config.run.folder / "features")
    entries = features.of_split("train")[:3]
    seen = sorted({int(i) for entry in entries for i in features.read(entry).input_ids})
    head = load_target_head(features.checked_head(), "cpu", torch.float32).head
    train = config.train.model_copy(update={"vocabulary": "corpus"})
    kept = training_head(head, features, entries, train)
    assert len(kept.weight) == len(seen) < len(head)
    tokens = torch.tensor(seen)
    assert torch.equal(kept.weight[kept.labels(tokens)], head[tokens])


def test_target_keeps_the_whole_head(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    features = open_features(config.run.folder / "features")
    head = load_target_head(features.checked_head(), "cpu", torch.float32).head
    kept = training_head(head, features, features.of_split("train"), config.train)
    tokens = torch.arange(len(head))
    assert kept.weight is head
    assert torch.equal(kept.labels(tokens), tokens)


def test_token_ids_are_read_without_features(tmp_path: Path) -> None:
    features = open_features(make_config(tmp_path).run.folder / "features")
    for entry in features.entries:
        assert torch.equal(features.read_input_ids(entry), features.read(entry).input_ids)
