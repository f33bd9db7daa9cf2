"""An exported folder reloaded in a process of its own: its logits on recorded rows against the training code's.

The reloaded drafter runs as a server runs it, block by block over cached context (drafter/cache.py); the checkpoint,
rounded to bf16 in memory, runs as in training, all blocks in one forward. Both in float32.

n anchors, S tokens, K block size, V vocabulary, H hidden.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from common.distributed import end_with_parent
from data.feature_shards import FeatureRow
from data.features import FeatureSet, open_features
from drafter.cache import ContextCache, draft
from drafter.folder import load_drafter
from drafter.model import BlockLayout, Drafter, block_embeddings
from target.head import TargetHead, load_target_head

TOLERANCE = 1e-5
"""Largest difference of logits over the largest logit: two orders of float32 sums, not two models."""
ANCHORS_PER_ROW = 8


@dataclass(frozen=True)
class VerifyJob:
    export: Path
    checkpoint: Path
    features: Path
    num_rows: int
    cpu_threads: int


@dataclass(frozen=True)
class Verification:
    num_rows: int
    num_blocks: int
    reload_difference: float
    """Reloaded export against the training code on bf16-rounded weights, over the largest logit."""
    rounding_difference: float
    """bf16-rounded against float32 weights, over the largest logit: what the export's precision costs."""
    rounding_same_argmax: float
    """Share of drafted slots whose best token the rounding left alone."""


def verify_in_new_process(job: VerifyJob) -> Verification:
    """Run `verify_export` in a fresh interpreter, so that nothing in memory stands in for what is on disk."""
    context = multiprocessing.get_context("spawn")
    # a pool's process waits for ever for the next job of a killed export
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=end_with_parent, initargs=(os.getpid(),)
    ) as pool:
        try:
            return pool.submit(verify_export, job).result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"the process that verifies {job.export} was killed (out of memory?); free memory and export again"
            ) from error


@torch.no_grad()
def verify_export(job: VerifyJob) -> Verification:
    """Raises ValueError if the export does not reload or its logits are not the training code's."""
    torch.set_num_threads(job.cpu_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exported = load_drafter(job.export, device, torch.float32)
    master = load_drafter(job.checkpoint, device, torch.float32)
    rounded = load_drafter(job.checkpoint, device, torch.bfloat16).float()
    features = open_features(job.features)
    head = load_target_head(features.checked_head(), device, torch.float32)
    check_head(head, exported)
    sums = _Sums()
    for row in _rows(features, job.num_rows):
        block = _Row.of(row, head, exported)
        wanted = block.logits_in_training(rounded)
        sums.add(wanted, block.logits_in_serving(exported), block.logits_in_training(master))
    if sums.num_rows == 0:
        raise ValueError(
            f"no row of {job.features} has a response of two tokens, so nothing can be verified; run extract"
        )
    result = sums.result()
    if not result.reload_difference <= TOLERANCE:  # also if it is NaN
        raise ValueError(
            f"the export of {job.checkpoint} does not compute what was trained: its logits differ by {result.reload_difference:.1e} "
            f"of the largest, allowed are {TOLERANCE:.0e}; nothing was exported, keep the checkpoint and report this"
        )
    return result


def check_head(head: TargetHead, drafter: Drafter) -> None:
    """Raises ValueError if embedding or head are not of the drafter's target, or all zero."""
    config = drafter.config
    wanted = (config.vocab_size, config.hidden_size)
    for name, tensor in (("embedding", head.embedding), ("head", head.head)):
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"the target's {name} is {list(tensor.shape)}, the drafter wants {list(wanted)}; extract again"
            )
        if not tensor.any() or not tensor.isfinite().all():
            raise ValueError(f"the target's {name} is zero or not finite; extract again")


def find_anchors(loss_mask: Tensor, most: int) -> Tensor:
    """Up to `most` positions, spread evenly, that may be anchors: they and the next token are the target's own."""
    places = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    chosen = torch.linspace(0, len(places) - 1, min(most, len(places))).round().long()
    return places[chosen]


def _rows(features: FeatureSet, num_rows: int) -> Iterator[FeatureRow]:
    """The first rows, in corpus order, that have an anchor."""
    rows = (features.read(entry) for entry in features.entries if entry.num_response_tokens > 1)
    return islice((row for row in rows if len(find_anchors(row.loss_mask, 1))), num_rows)


@dataclass(frozen=True)
class _Row:
    """A row's anchors and what both ways of drafting read."""

    features: Tensor  # (S, D, H)
    anchors: Tensor  # (n,)
    embeddings: Tensor  # (n, K, H)
    head: Tensor  # (V, H)

    @classmethod
    def of(cls, row: FeatureRow, head: TargetHead, drafter: Drafter) -> _Row:
        device, config = head.head.device, drafter.config
        anchors = find_anchors(row.loss_mask, ANCHORS_PER_ROW).to(device)
        tokens = row.input_ids.to(device)[anchors]
        embeddings = block_embeddings(
            head.embedding, tokens[None], config.mask_token_id, config.block_size
        )
        return cls(row.features.to(device, torch.float32), anchors, embeddings[0], head.head)

    def logits_in_training(self, drafter: Drafter) -> Tensor:
        """(n, K-1, V) from one forward over all blocks."""
        positions = torch.arange(len(self.features), device=self.anchors.device)[None]
        anchors = self.anchors[None]
        layout = BlockLayout(
            positions, torch.zeros_like(positions), anchors, torch.zeros_like(anchors)
        )
        hidden = drafter(self.features[None], self.embeddings[None], layout)[0]
        return hidden[:, 1:] @ self.head.T

    def logits_in_serving(self, drafter: Drafter) -> Tensor:
        """(n, K-1, V), a draft at a time while the context grows."""
        cache = ContextCache(drafter, len(self.features))
        logits = []
        for anchor, embeddings in zip(self.anchors.tolist(), self.embeddings, strict=True):
            cache.append([self.features[cache.lengths[0] : anchor]])
            logits.append(draft(drafter, cache, embeddings[None])[0, 1:] @ self.head.T)
        return torch.stack(logits)


@dataclass
class _Sums:
    num_rows: int = 0
    num_blocks: int = 0
    num_slots: int = 0
    num_same_argmax: int = 0
    largest: float = 0.0
    reload: float = 0.0
    rounding: float = 0.0

    def add(self, rounded: Tensor, served: Tensor, master: Tensor) -> None:
        """Logits of one row, each (n, K-1, V)."""
        self.num_rows += 1
        self.num_blocks += len(rounded)
        same = rounded.argmax(-1) == master.argmax(-1)
        self.num_slots += same.numel()
        self.num_same_argmax += int(same.sum())
        # torch's max keeps a NaN, Python's may lose it
        self.largest = _max(self.largest, rounded)
        self.reload = _max(self.reload, served - rounded)
        self.rounding = _max(self.rounding, master - rounded)

    def result(self) -> Verification:
        return Verification(
            self.num_rows,
            self.num_blocks,
            self.reload / self.largest,
            self.rounding / self.largest,
            self.num_same_argmax / self.num_slots,
        )


def _max(so_far: float, values: Tensor) -> float:
    return float(torch.maximum(values.abs().max(), values.new_tensor(so_far)))
