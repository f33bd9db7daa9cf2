"""Which samples an optimizer step sees, and their micro-batches.

A step's batch is a pure function of (seed, samples consumed so far): epochs are laid end to end (train/order.py), so a
batch may cross from one epoch into the next and no rank count changes it. Inside the batch, samples are sorted by length
before they are cut into micro-batches: little padding, and ranks get equal work.

B sequences, S context tokens, N anchors, K block size, D taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from configs.schema import TrainSection
from data.soft_labels import SoftLabels
from drafter.masks import BlockLayout
from train.anchors import Anchors, sample_anchors
from train.order import Order, Sample
from train.sources import AnyRow, Source


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
    num_candidates: int = 0
    """Positions of the documents that may be an anchor."""
    num_at_starts: int = 0
    """Anchors at starts of real walks (train/walks.py)."""
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
        return replace(
            self,
            label_mask=torch.zeros_like(self.label_mask),
            num_tokens=0,
            num_candidates=0,
            num_at_starts=0,
        )


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


def cut_packs(samples: Sequence[Sample], train: TrainSection) -> list[list[Sample]]:
    """The global batch as packs of at most train.pack_tokens tokens and train.pack_blocks blocks: first fit, longest first.

    Sizes are upper bounds from the manifest, so that no row is read and every rank cuts alike.
    """
    assert train.pack_tokens is not None
    assert train.pack_blocks is not None
    packs: list[list[Sample]] = []
    rooms: list[tuple[int, int]] = []  # tokens and blocks left
    for [sample] in cut_micro_batches(samples, 1, train.max_tokens):
        tokens = min(sample.entry.num_tokens, train.max_tokens)
        blocks = min(sample.entry.num_response_tokens, train.num_anchors)
        fits = (i for i, (t, n) in enumerate(rooms) if t >= tokens and n >= blocks)
        place = next(fits, len(packs))
        if place == len(packs):
            packs.append([])
            rooms.append((train.pack_tokens, train.pack_blocks))
        packs[place].append(sample)
        rooms[place] = (rooms[place][0] - tokens, rooms[place][1] - blocks)
    return packs


def accumulation_steps(num_micro_batches: int, world_size: int) -> int:
    """Micro-batches a rank runs in one optimizer step; the last ones of some ranks may be empty."""
    return -(-num_micro_batches // world_size)


@dataclass(frozen=True)
class Batcher:
    """Reads one rank's part of a global batch."""

    source: Source
    order: Order
    train: TrainSection
    block_size: int
    seed: int
    rank: int
    world_size: int
    walk_starts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By sample id, where verify passes start (train/walks.py); anchors are drawn uniformly where there is none."""

    def samples(self, consumed: int) -> list[Sample]:
        """The whole global batch, the same on every rank."""
        return self.order.samples(consumed, self.train.global_batch_samples)

    def cut(self, consumed: int) -> list[list[Sample]]:
        """The global batch as micro-batches, the same on every rank."""
        samples, train = self.samples(consumed), self.train
        if train.pack_tokens is not None:
            return cut_packs(samples, train)
        return cut_micro_batches(samples, train.micro_batch_samples, train.max_tokens)

    def load(self, consumed: int) -> list[MicroBatch]:
        """This rank's micro-batches; every rank gets the same number, neighbours in length at the same time.

        Raises SourceClosed if the run stops while the source waits.
        """
        self.source.prepare(consumed, self.own)
        cut = self.cut(consumed)
        loaded = [self._read(samples) for samples in cut[self.rank :: self.world_size]]
        missing = accumulation_steps(len(cut), self.world_size) - len(loaded)
        if missing:
            loaded.append((loaded[-1] if loaded else self._read(cut[-1])).without_labels())
        return loaded

    def own(self, consumed: int) -> list[Sample]:
        """The samples that `load` reads on this rank."""
        cut = self.cut(consumed)
        return [sample for part in cut[self.rank :: self.world_size] or cut[-1:] for sample in part]

    def _read(self, samples: Sequence[Sample]) -> MicroBatch:
        rows, anchors = [], []
        for sample in samples:
            row = self.source.read(sample.entry)  # decoded into the batch, below
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
                    self._starts(sample),
                    self.train.walk_share,
                )
            )
        train = self.train
        if train.pack_tokens is not None and train.pack_blocks is not None:
            return pack(rows, anchors, train.max_tokens, train.pack_tokens, train.pack_blocks)
        return collate(rows, anchors, train.max_tokens)

    def _starts(self, sample: Sample) -> Tensor | None:
        found = self.walk_starts.get(sample.entry.sample_id)
        return None if found is None else torch.tensor(found, dtype=torch.int64)


@dataclass(frozen=True)
class _Place:
    """Where a document goes: its row, where its context and its blocks begin in it, and its number there."""

    row: int
    token: int = 0
    block: int = 0
    document: int = 0


def collate(rows: Sequence[AnyRow], anchors: Sequence[Anchors], max_tokens: int) -> MicroBatch:
    """Right-pad documents and their blocks, a row each.

    Context ends where the last block starts: nothing later is ever attended.
    """
    shape = (len(rows), max(1, *map(_num_context, anchors)), max(1, *map(_num_blocks, anchors)))
    return _fill(rows, anchors, max_tokens, shape, [_Place(row) for row in range(len(rows))])


def pack(
    rows: Sequence[AnyRow],
    anchors: Sequence[Anchors],
    max_tokens: int,
    pack_tokens: int,
    pack_blocks: int,
) -> MicroBatch:
    """All documents in one row of `pack_tokens` context tokens and `pack_blocks` blocks, whatever they are."""
    places, token, block = [], 0, 0
    for document, chosen in enumerate(anchors):
        places.append(_Place(0, token, block, document))
        token, block = token + _num_context(chosen), block + _num_blocks(chosen)
    assert token <= pack_tokens
    assert block <= pack_blocks
    return _fill(rows, anchors, max_tokens, (1, pack_tokens, pack_blocks), places)


def _fill(
    rows: Sequence[AnyRow],
    anchors: Sequence[Anchors],
    max_tokens: int,
    shape: tuple[int, int, int],
    places: Sequence[_Place],
) -> MicroBatch:
    """shape: (B, S, N); what no document fills is padding."""
    size, num_tokens, num_anchors = shape
    num_slots = anchors[0].labels.shape[1]
    # pinned, so that the copy to a GPU runs beside its work; features are decoded straight into it
    features = torch.zeros(
        (size, num_tokens, *rows[0].token_shape),
        dtype=rows[0].dtype,
        pin_memory=torch.cuda.is_available(),
    )
    positions = torch.arange(num_tokens).expand(size, -1).contiguous()
    documents = torch.full((size, num_tokens), -1)
    anchor_positions = torch.zeros((size, num_anchors), dtype=torch.int64)
    anchor_documents = torch.full((size, num_anchors), -1)
    anchor_tokens = torch.zeros_like(anchor_positions)
    labels = torch.zeros((size, num_anchors, num_slots), dtype=torch.int64)
    label_mask = torch.zeros((size, num_anchors, num_slots), dtype=torch.bool)
    for row, chosen, at in zip(rows, anchors, places, strict=True):
        length = _num_context(chosen)
        tokens = slice(at.token, at.token + length)
        blocks = slice(at.block, at.block + len(chosen.positions))
        row.features_into(features[at.row, tokens])
        positions[at.row, tokens] = torch.arange(length)
        documents[at.row, tokens] = at.document
        anchor_positions[at.row, blocks] = chosen.positions
        anchor_documents[at.row, blocks] = at.document
        anchor_tokens[at.row, blocks] = row.input_ids[chosen.positions]
        labels[at.row, blocks] = chosen.labels
        label_mask[at.row, blocks] = chosen.label_mask
    return MicroBatch(
        features,
        BlockLayout(positions, documents, anchor_positions, anchor_documents),
        anchor_tokens,
        labels,
        label_mask,
        tuple(row.sample_id for row in rows),
        sum(min(len(row.input_ids), max_tokens) for row in rows),
        sum(chosen.num_candidates for chosen in anchors),
        sum(chosen.num_at_starts for chosen in anchors),
        _soft_labels(rows, anchors, labels.shape, places),
    )


def _soft_labels(
    rows: Sequence[AnyRow],
    anchors: Sequence[Anchors],
    shape: torch.Size,
    places: Sequence[_Place],
) -> SoftLabels | None:
    """Of every slot of (B, N, K-1) with a label; of no meaning elsewhere."""
    if rows[0].soft_labels is None:
        return None
    kept = rows[0].soft_labels.token_ids.shape[1]
    token_ids = torch.zeros((*shape, kept), dtype=torch.int64)
    log_probs = torch.zeros((*shape, kept))
    for row, chosen, at in zip(rows, anchors, places, strict=True):
        assert row.soft_labels is not None
        slots = chosen.positions[:, None] + torch.arange(1, shape[2] + 1)  # (N, K-1)
        slots = slots.masked_fill(~chosen.label_mask, 0)
        blocks = slice(at.block, at.block + len(slots))
        token_ids[at.row, blocks] = row.soft_labels.token_ids[slots]
        log_probs[at.row, blocks] = row.soft_labels.log_probs[slots]
    return SoftLabels(token_ids, log_probs)


def _num_context(anchors: Anchors) -> int:
    return int(anchors.positions[-1]) if len(anchors.positions) else 0


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
