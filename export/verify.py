"""An exported folder reloaded in a process of its own: its logits on recorded rows against the training code's.

The reloaded drafter runs as a server runs it, block by block over cached context (drafter/cache.py); the checkpoint,
rounded to bf16 in memory, runs as in training, all blocks in one forward. Both in float32. One drafter is alive at a time,
of which hidden states are kept; logits are made from them a slice of the vocabulary at a time.

n anchors, S tokens, K block size, V vocabulary, H hidden.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
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
from drafter.config import DrafterConfig
from drafter.folder import load_drafter, read_drafter_config
from drafter.model import BlockLayout, Drafter, block_embeddings
from drafter.own_head import require_targets_own
from export.target_files import require_same_head
from target.head import TargetHead, load_target_head

TOLERANCE = 1e-5
"""Largest difference of logits over the largest logit: two orders of float32 sums, not two models."""
ANCHORS_PER_ROW = 8
VOCABULARY_SLICE = 16_384


@dataclass(frozen=True)
class VerifyJob:
    export: Path
    checkpoint: Path
    features: Path | str
    target: Path
    """The target's folder, whose embedding and head must be those that the features were made with."""
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
    """Raises ValueError if the export does not reload, its logits are not the training code's, or its target is another."""
    torch.set_num_threads(job.cpu_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features, config = open_features(job.features), read_drafter_config(job.export)
    head = load_target_head(features.checked_head(), device, None)
    check_head(head, config)
    require_same_head(head, job.target)
    require_targets_own(job.export, lambda: head)
    rows = [_Row.of(row, head, config) for row in _rows(features, job.num_rows)]
    if not rows:
        raise ValueError(
            f"no row of {job.features} has a response of two tokens, so nothing can be verified; run extract"
        )
    served = _served(job.export, rows, device)
    master, rounded = _trained(job.checkpoint, rows, device)
    result = _compare(rounded, served, master, head.head)
    if not result.reload_difference <= TOLERANCE:  # also if it is NaN
        raise ValueError(
            f"the export of {job.checkpoint} does not compute what was trained: its logits differ by {result.reload_difference:.1e} "
            f"of the largest, allowed are {TOLERANCE:.0e}; nothing was exported, keep the checkpoint and report this"
        )
    num_blocks = sum(len(row.anchors) for row in rows)
    return Verification(len(rows), num_blocks, *vars(result).values())


def check_head(head: TargetHead, config: DrafterConfig) -> None:
    """Raises ValueError if embedding or head are not of the drafter's target, or all zero."""
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


def _served(export: Path, rows: Sequence[_Row], device: torch.device) -> Tensor:
    """Hidden states (blocks, K-1, H) of the exported drafter, which is gone afterwards."""
    drafter = load_drafter(export, device, torch.float32)
    return torch.cat([row.in_serving(drafter) for row in rows])


def _trained(checkpoint: Path, rows: Sequence[_Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the checkpoint, as it is and rounded to bf16."""
    drafter = load_drafter(checkpoint, device, torch.float32)
    master = torch.cat([row.in_training(drafter) for row in rows])
    for parameter in drafter.parameters():
        # a tensor of its own: in place, each page of the checkpoint's file would be copied
        parameter.data = parameter.data.bfloat16().float()
    return master, torch.cat([row.in_training(drafter) for row in rows])


@dataclass(frozen=True)
class _Row:
    """A row's anchors and what both ways of drafting read."""

    features: Tensor  # (S, D, H)
    anchors: Tensor  # (n,)
    embeddings: Tensor  # (n, K, H)

    @classmethod
    def of(cls, row: FeatureRow, head: TargetHead, config: DrafterConfig) -> _Row:
        device = head.head.device
        anchors = find_anchors(row.loss_mask, ANCHORS_PER_ROW).to(device)
        tokens = row.input_ids.to(device)[anchors]
        embeddings = block_embeddings(
            head.embedding, tokens[None], config.mask_token_id, config.block_size
        )[0]
        last = int(anchors[-1])  # no feature behind the last anchor is looked at
        return cls(row.features[:last].to(device, torch.float32), anchors, embeddings.float())

    def in_training(self, drafter: Drafter) -> Tensor:
        """Hidden states (n, K-1, H) from one forward over all blocks."""
        positions = torch.arange(len(self.features), device=self.anchors.device)[None]
        anchors = self.anchors[None]
        layout = BlockLayout(
            positions, torch.zeros_like(positions), anchors, torch.zeros_like(anchors)
        )
        return drafter(self.features[None], self.embeddings[None], layout)[0, :, 1:]

    def in_serving(self, drafter: Drafter) -> Tensor:
        """The same, a draft at a time while the context grows."""
        cache = ContextCache(drafter, len(self.features))
        hidden = []
        for anchor, embeddings in zip(self.anchors.tolist(), self.embeddings, strict=True):
            cache.append([self.features[cache.lengths[0] : anchor]])
            hidden.append(draft(drafter, cache, embeddings[None])[0, 1:])
        return torch.stack(hidden)


@dataclass(frozen=True)
class _Differences:
    reload_difference: float
    rounding_difference: float
    rounding_same_argmax: float


def _compare(rounded: Tensor, served: Tensor, master: Tensor, head: Tensor) -> _Differences:
    """Of hidden states (blocks, K-1, H), the logits that `head` (V, H) gives them."""
    largest = reload = rounding = torch.zeros((), device=head.device)
    best = {name: _Best.none(rounded) for name in ("rounded", "master")}
    for start in range(0, len(head), VOCABULARY_SLICE):
        part = head[start : start + VOCABULARY_SLICE].float().T  # (H, slice)
        logits, exact = rounded @ part, master @ part
        # torch's maximum keeps a NaN, Python's may lose it
        largest = torch.maximum(largest, logits.abs().max())
        reload = torch.maximum(reload, (served @ part - logits).abs().max())
        rounding = torch.maximum(rounding, (exact - logits).abs().max())
        best["rounded"] = best["rounded"].or_better(logits, start)
        best["master"] = best["master"].or_better(exact, start)
    same = (best["rounded"].token == best["master"].token).float().mean()
    return _Differences(float(reload / largest), float(rounding / largest), float(same))


@dataclass(frozen=True)
class _Best:
    """The likeliest token of every slot so far."""

    logit: Tensor
    token: Tensor

    @classmethod
    def none(cls, hidden: Tensor) -> _Best:
        shape = hidden.shape[:-1]
        return cls(
            hidden.new_full(shape, -torch.inf),
            torch.zeros(shape, dtype=torch.int64).to(hidden.device),
        )

    def or_better(self, logits: Tensor, start: int) -> _Best:
        logit, token = logits.max(-1)
        better = logit > self.logit
        return _Best(
            torch.where(better, logit, self.logit), torch.where(better, token + start, self.token)
        )
