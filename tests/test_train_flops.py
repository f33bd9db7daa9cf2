"""Operations counted from shapes are those a real step takes, and pairs are those the mask shows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from train_runs import ONE_RANK, VOCABULARY, make_config

from data.features import open_features
from drafter.config import DrafterConfig, drafter_config
from drafter.head import sparse_log_probs
from drafter.masks import BlockLayout, structured_masks
from drafter.model import Drafter
from train.batches import Batcher
from train.engine import join_process_group
from train.flops import (
    Work,
    block_pairs,
    draft_flops,
    peak_tflops,
    train_flops,
    work_of_blocks,
)
from train.loop import train_drafter
from train.order import FullOrder
from train.sources import ShardSource

CONFIG = DrafterConfig(
    hidden_size=48,
    num_layers=3,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=97,
    block_size=5,
    mask_token_id=96,
    target_layer_ids=(1, 3),
    layer_types=("full_attention",) * 3,
    sliding_window=None,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    num_target_layers=6,
)
LENGTH, BLOCKS = 40, 7


def layout_after(length: int, blocks: int) -> BlockLayout:
    """Blocks that all see the whole context: then nothing that attention computes is masked."""
    place = torch.arange(length)[None]
    anchors = torch.full((1, blocks), length)
    return BlockLayout(place, place * 0, anchors, anchors * 0)


def counted(config: DrafterConfig, frozen: set[str], backward: bool = True) -> int:
    """What torch counts in a forward and backward of drafter and head."""
    torch.manual_seed(0)
    drafter = Drafter(config)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name not in frozen)
    head = torch.randn(config.vocab_size, config.hidden_size)
    features = torch.randn(1, LENGTH, len(config.target_layer_ids), config.hidden_size)
    embeddings = torch.randn(1, BLOCKS, config.block_size, config.hidden_size)
    layout = layout_after(LENGTH, BLOCKS)
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        hidden = drafter(features, embeddings, layout, "structured")
        rows = hidden[:, :, 1:].reshape(-1, config.hidden_size)
        asked = torch.zeros(len(rows), 1, dtype=torch.int64)
        loss = sparse_log_probs(rows, head, asked).log_probs.sum()
        if not backward:
            return counter.get_total_flops()
        loss.backward()
    # backward of the head gathers one row a slot: a product of vectors that has nothing to do with the vocabulary
    return counter.get_total_flops() - 2 * len(rows) * config.hidden_size


@pytest.mark.parametrize(
    "frozen",
    [
        (),
        ("fc.weight",),
        ("fc.weight", "hidden_norm.weight"),
        ("layers.1.mlp.up_proj.weight", "layers.2.self_attn.o_proj.weight"),
    ],
)
def test_operations_are_those_that_torch_counts(frozen: tuple[str, ...]) -> None:
    work = work_of_blocks(CONFIG, LENGTH, [LENGTH] * BLOCKS, CONFIG.block_size - 1)
    wanted = counted(CONFIG, set(frozen))
    assert train_flops(CONFIG, work, CONFIG.vocab_size, frozen) == wanted


def test_drafting_alone_is_the_forward_that_torch_counts() -> None:
    work = work_of_blocks(CONFIG, LENGTH, [LENGTH] * BLOCKS, CONFIG.block_size - 1)
    assert draft_flops(CONFIG, work, CONFIG.vocab_size) == counted(CONFIG, set(), backward=False)


def test_a_first_layer_that_is_frozen_with_all_before_it_needs_no_backward() -> None:
    names = [name for name, _ in Drafter(CONFIG).named_parameters()]
    frozen = {n for n in names if n.startswith(("layers.0.", "fc.", "hidden_norm."))}
    work = work_of_blocks(CONFIG, LENGTH, [LENGTH] * BLOCKS, CONFIG.block_size - 1)
    assert train_flops(CONFIG, work, CONFIG.vocab_size, frozen) == counted(CONFIG, frozen)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 100])
def test_pairs_are_those_that_the_mask_shows(window: int | None) -> None:
    for anchor, block_size in itertools.product((1, 2, 3, 8, 20), (2, 5, 12)):
        place = torch.arange(30)[None]
        position = torch.tensor([[anchor]])
        layout = BlockLayout(place, place * 0, position, position * 0)
        context, own = structured_masks(layout, block_size, window)
        slots = (1, 1, block_size, -1)  # the masks have one row where all slots agree
        shown = context.expand(slots).sum() + own.expand(slots).sum()
        assert block_pairs(anchor, block_size, window) == int(shown)


def test_work_adds_up_over_batches_and_layers_of_both_kinds() -> None:
    config = dataclasses.replace(
        CONFIG,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        sliding_window=8,
    )
    parts = [work_of_blocks(config, 30, [3, 9, 20], 4), work_of_blocks(config, 12, [11], 4)]
    whole = work_of_blocks(config, 42, [3, 9, 20, 11], 4)
    together = Work(
        sum(part.context_tokens for part in parts),
        sum(part.blocks for part in parts),
        sum(part.head_rows for part in parts),
        tuple(map(sum, zip(*(part.pairs for part in parts), strict=True))),
    )
    assert together == whole
    assert whole.pairs[0] == whole.pairs[2] < whole.pairs[1]
    assert sum(train_flops(config, part, 97) for part in parts) == train_flops(config, whole, 97)


def test_a_run_logs_operations_a_second_and_mfu_where_a_peak_is_known(tmp_path: Path) -> None:
    """The counted operations of one step, by hand from its batches, over the logged time."""
    join_process_group(ONE_RANK)
    config = make_config(
        tmp_path,
        "train.steps=1",
        "train.peak_tflops=0.5",
        "train.pack_tokens=90",
        "train.pack_blocks=13",
    )
    train_drafter(config, ONE_RANK)
    line = json.loads((config.run.folder / "logs" / "train.jsonl").read_text().splitlines()[0])
    features = open_features(config.run.folder / "features")
    order = FullOrder(features.of_split("train"), config.run.seed)
    batcher = Batcher(ShardSource(features), order, config.train, 5, config.run.seed, 0, 1)
    shape, flops = drafter_config(config), 0.0
    for batch in batcher.load(0):
        places, anchors = batch.layout.context_documents, batch.layout.anchor_documents >= 0
        found = batch.layout.anchor_positions[anchors].tolist()
        flops += train_flops(
            shape, work_of_blocks(shape, int((places >= 0).sum()), found, 4), VOCABULARY
        )
    assert line["speed/tflops_per_s"] == pytest.approx(flops / 1e12 / line["train/step_s"])
    assert line["speed/mfu"] == pytest.approx(line["speed/tflops_per_s"] / 0.5)
    plain = make_config(tmp_path / "plain", "train.steps=1")
    train_drafter(plain, ONE_RANK)
    assert "speed/mfu" not in (plain.run.folder / "logs" / "train.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Some Other GPU", None),
    ],
)
def test_peaks_by_device_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_seconds_waited_for_batches_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSource, "prepare", lambda *_: time.sleep(0.3))
    config = make_config(tmp_path, "train.steps=1")
    train_drafter(config, ONE_RANK)
    [line, *_] = (config.run.folder / "logs" / "train.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert 0.3 <= metrics["train/wait_s"] < metrics["train/step_s"]
