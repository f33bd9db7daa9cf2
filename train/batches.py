"""Which samples an optimizer step sees, and their micro-batches.

A step's batch is a pure function of (seed, samples consumed so far): epochs are seeded permutations laid end to end, so a
batch may cross from one epoch into the next and no rank count changes it. Inside the batch, samples are sorted by length
before they are cut into micro-batches: little padding, and ranks get equal work.

B sequences, S context tokens, N anchors, K block size, D taps, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from configs.schema import TrainSection
from data.features import FeatureRow, FeatureSet, RowEntry
from data.soft_labels import SoftLabels
from drafter.masks import BlockLayout
from train.anchors import Anchors, sample_anchors


@dataclass(frozen=True)
class Sample:
    """A document as an epoch sees it: the epoch chooses its anchors."""

    entry: RowEntry
    epoch: int


@dataclass(frozen=True)
class MicroBatch:
    """Documents of one forward, right-padded; padding is document -1 and has no label."""

    features: Tensor  # (B, S, D, H)
    layout: BlockLayout
    anchor_tokens: Tensor  # (B, N) int64
    labels: Tensor  # (B, N, K-1) int64
    label_mask: Tensor  # (B, N, K-1) bool
    sample_ids: tuple[str, ...]
    num_tokens: int
    """Document tokens, padding not counted."""
    soft: SoftLabels | None = None
    """The target's likeliest tokens in every slot, (B, N, K-1, P), if the features have them."""

    @property
    def num_slots(self) -> int:
        return int(self.label_mask.sum())

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            features=self.features.to(device, dtype, non_blocking=True),
            layout=BlockLayout(
                context_positions=moved(self.layout.context_positions),
                context_documents=moved(self.layout.context_documents),
                anchor_positions=moved(self.layout.anchor_positions),
                anchor_documents=moved(self.layout.anchor_documents),
            ),
            anchor_tokens=moved(self.anchor_tokens),
            labels=moved(self.labels),
            label_mask=moved(self.label_mask),
            soft=self.soft and SoftLabels(moved(self.soft.token_ids), moved(self.soft.log_probs)),
        )

    def without_labels(self) -> MicroBatch:
        """The same work and nothing to learn: for a rank that has no micro-batch left while others still reduce."""
        return replace(self, label_mask=torch.zeros_like(self.label_mask), num_tokens=0)


def samples_from(entries: Sequence[RowEntry], seed: int, consumed: int, count: int) -> list[Sample]:
    """Samples number `consumed`..`consumed + count - 1` of the endless seeded sequence of epochs."""
    samples = []
    for position in range(consumed, consumed + count):
        epoch, index = divmod(position, len(entries))
        samples.append(Sample(entries[_epoch_order(len(entries), seed, epoch)[index]], epoch))
    return samples


@lru_cache(maxsize=2)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    digest = hashlib.sha256(f"epoch {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(num_samples, generator=generator).tolist()


def cut_micro_batches(
    samples: Sequence[Sample], micro_batch_samples: int, max_tokens: int
) -> list[list[Sample]]:
    """The global batch as micro-batches, longest first (so that a step that does not fit fails at once)."""
    by_length = sorted(
        samples, key=lambda s: (-min(s.entry.num_tokens, max_tokens), s.entry.sample_id, s.epoch)
    )
    return [
        by_length[start : start + micro_batch_samples]
        for start in range(0, len(by_length), micro_batch_samples)
    ]


def accumulation_steps(num_micro_batches: int, world_size: int) -> int:
    """Micro-batches a rank runs in one optimizer step; the last ones of some ranks may be empty."""
    return -(-num_micro_batches // world_size)


@dataclass(frozen=True)
class Batcher:
    """Reads one rank's part of a global batch."""

    features: FeatureSet
    entries: Sequence[RowEntry]
    train: TrainSection
    block_size: int
    seed: int
    rank: int
    world_size: int

    def samples(self, consumed: int) -> list[Sample]:
        """The whole global batch, the same on every rank."""
        return samples_from(self.entries, self.seed, consumed, self.train.global_batch_samples)

    def load(self, consumed: int) -> list[MicroBatch]:
        """This rank's micro-batches; every rank gets the same number, neighbours in length at the same time."""
        cut = cut_micro_batches(
            self.samples(consumed), self.train.micro_batch_samples, self.train.max_tokens
        )
        loaded = [self._read(samples) for samples in cut[self.rank :: self.world_size]]
        missing = accumulation_steps(len(cut), self.world_size) - len(loaded)
        if missing:
            loaded.append((loaded[-1] if loaded else self._read(cut[-1])).without_labels())
        return loaded

    def _read(self, samples: Sequence[Sample]) -> MicroBatch:
        rows, anchors = [], []
        for sample in samples:
            row = self.features.read(sample.entry)
            limit = self.train.max_tokens
            rows.append(row)
            anchors.append(
                sample_anchors(
                    row.input_ids[:limit],
                    row.loss_mask[:limit],
                    self.block_size,
                    self.train.num_anchors,
                    self.seed,
                    sample.epoch,
                    sample.entry.sample_id,
                )
            )
        return collate(rows, anchors, self.train.max_tokens)


def collate(rows: Sequence[FeatureRow], anchors: Sequence[Anchors], max_tokens: int) -> MicroBatch:
    """Right-pad documents and their blocks. Context ends where the last block starts: nothing later is ever attended."""
    lengths = [int(a.positions[-1]) if len(a.positions) else 0 for a in anchors]
    size, num_tokens, num_anchors = len(rows), max(1, *lengths), max(1, *map(_num_blocks, anchors))
    num_slots = anchors[0].labels.shape[1]
    features = rows[0].features.new_zeros((size, num_tokens, *rows[0].features.shape[1:]))
    positions = torch.arange(num_tokens).expand(size, -1).contiguous()
    documents = torch.full((size, num_tokens), -1)
    anchor_positions = torch.zeros((size, num_anchors), dtype=torch.int64)
    anchor_documents = torch.full((size, num_anchors), -1)
    anchor_tokens = torch.zeros_like(anchor_positions)
    labels = torch.zeros((size, num_anchors, num_slots), dtype=torch.int64)
    label_mask = torch.zeros((size, num_anchors, num_slots), dtype=torch.bool)
    for i, (row, chosen, length) in enumerate(zip(rows, anchors, lengths, strict=True)):
        blocks = slice(0, len(chosen.positions))
        features[i, :length] = row.features[:length]
        documents[i, :length] = 0
        anchor_positions[i, blocks] = chosen.positions
        anchor_documents[i, blocks] = 0
        anchor_tokens[i, blocks] = row.input_ids[chosen.positions]
        labels[i, blocks] = chosen.labels
        label_mask[i, blocks] = chosen.label_mask
    return MicroBatch(
        features,
        BlockLayout(positions, documents, anchor_positions, anchor_documents),
        anchor_tokens,
        labels,
        label_mask,
        tuple(row.sample_id for row in rows),
        sum(min(len(row.input_ids), max_tokens) for row in rows),
        _soft_labels(rows, anchors, labels.shape),
    )


def _soft_labels(
    rows: Sequence[FeatureRow], anchors: Sequence[Anchors], shape: torch.Size
) -> SoftLabels | None:
    """Of every slot of (B, N, K-1) with a label, 0 elsewhere."""
    if rows[0].soft_labels is None:
        return None
    kept = rows[0].soft_labels.token_ids.shape[1]
    token_ids = torch.zeros((*shape, kept), dtype=torch.int64)
    log_probs = torch.zeros((*shape, kept))
    for i, (row, chosen) in enumerate(zip(rows, anchors, strict=True)):
        assert row.soft_labels is not None
        slots = chosen.positions[:, None] + torch.arange(1, shape[2] + 1)  # (N, K-1)
        slots = slots.masked_fill(~chosen.label_mask, 0)
        token_ids[i, : len(slots)] = row.soft_labels.token_ids[slots]
        log_probs[i, : len(slots)] = row.soft_labels.log_probs[slots]
    return SoftLabels(token_ids, log_probs)


def _num_blocks(anchors: Anchors) -> int:
    return len(anchors.positions)


def prefetched(
    load: Callable[[int], list[MicroBatch]], positions: Iterator[int], threads: int
) -> Iterator[list[MicroBatch]]:
    """`load` of each position in order, the next one read while the caller works. An error in it is raised here.

    `threads`: torch threads of the reader (torch counts them by thread; a second one would fight the trainer's).
    """
    with ThreadPoolExecutor(1, "batches", torch.set_num_threads, (threads,)) as pool:
        pending = pool.submit(load, next(positions))
        for position in positions:
            ready, pending = pending, pool.submit(load, position)
            yield ready.result()
        yield pending.result()
