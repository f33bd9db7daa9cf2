"""One optimizer step up to the update: the normaliser, forwards, backwards, and what all ranks agree on.

The gradient is that of   sum_{blocks, slots of the global batch} w d / (slots * mean weight of the last step),   so how
the batch is split over ranks and micro-batches changes nothing but rounding. The slots are counted from the data before
the first backward; the mean weight of the step itself would be known only after the last forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.distributed import sum_over_ranks
from configs.schema import Config
from drafter.model import block_embeddings
from train.batches import MicroBatch
from train.engine import Engine
from train.flops import train_flops, work_of_blocks
from train.losses import LossMix, ce_weights
from train.objective import BatchSums, micro_batch_loss
from train.schedule import LossPhase, loss_phase
from train.stop import StopRequest, leave
from train.vocabulary import TrainingHead


@dataclass(frozen=True)
class StepOutcome:
    """The same on every rank."""

    sums: BatchSums
    is_finite: bool
    """The loss, and every gradient of every micro-batch."""
    stop_signals: Tensor
    """(2,), see StopRequest."""
    flops: float
    """Of forward and backward (train/flops.py), all ranks."""

    @property
    def is_stopping(self) -> bool:
        return bool(self.stop_signals.any())

    def leave(self) -> None:
        leave(self.stop_signals)


class Stepper:
    """Accumulates the gradient of a global batch in the engine; the engine's `step` is the caller's."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        embedding: Tensor,
        head: TrainingHead,
        stop: StopRequest,
    ):
        """embedding: (V, H) of the target."""
        self.config, self.engine, self.stop = config, engine, stop
        self.embedding, self.head = embedding, head
        self.mix = LossMix.from_recipe(config)
        drafter = engine.drafter
        self.frozen = {n for n, p in drafter.named_parameters() if not p.requires_grad}

    def accumulate(
        self, batches: Sequence[MicroBatch], step: int, mean_weight: float | None
    ) -> StepOutcome:
        """Forward and backward of this rank's micro-batches.

        mean_weight: of the last step; None in the first, which is decayed cross-entropy and known from the data.
        """
        device = self.engine.ranks.device
        normaliser = self.normaliser(batches, mean_weight)
        sums = torch.zeros(len(vars(BatchSums())), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            loss, own = self._loss(
                batch.to(device, self.engine.dtype), loss_phase(step, self.config.train), normaliser
            )
            self.engine.backward(loss, last=index == len(batches) - 1)
            sums += own
        flops = torch.tensor([sum(map(self.flops, batches))], dtype=torch.float64)
        others = [self.engine.take_not_finite()[None], flops, self.stop.received()]
        total = sum_over_ranks(torch.cat([sums, *(part.to(sums) for part in others)])).cpu()
        batch_sums = BatchSums.of(total[: len(sums)])
        not_finite, all_flops, *signals = total[len(sums) :].tolist()
        return StepOutcome(
            batch_sums,
            is_finite=math.isfinite(batch_sums.loss) and not_finite == 0,
            stop_signals=torch.tensor(signals),
            flops=all_flops,
        )

    def flops(self, batch: MicroBatch) -> float:
        """Forward and backward of a micro-batch; 0 for one without labels, which a rank only repeats."""
        layout, live = batch.layout, batch.label_mask.any(-1)  # (B, N)
        if not live.any():
            return 0.0
        context = int((layout.context_documents >= 0).sum())
        anchors = layout.anchor_positions[live].tolist()
        config = self.engine.drafter.config
        work = work_of_blocks(config, context, anchors, config.block_size - 1)
        return train_flops(config, work, len(self.head.weight), self.frozen)

    def normaliser(self, batches: Sequence[MicroBatch], mean_weight: float | None) -> float:
        """Supervised slots of the global batch times the mean weight. Raises ValueError if there is no slot."""
        counted = [
            [float(batch.num_slots), float(self._decayed(batch.label_mask))] for batch in batches
        ]
        slots, decayed = sum_over_ranks(torch.tensor(counted, dtype=torch.float64).sum(0)).tolist()
        if slots == 0:
            raise ValueError(
                f"a batch of train.global_batch_samples={self.config.train.global_batch_samples} has no response token "
                f"within train.max_tokens={self.config.train.max_tokens}; raise one of them"
            )
        return slots * (decayed / slots if mean_weight is None else mean_weight)

    def _decayed(self, label_mask: Tensor) -> Tensor:
        return ce_weights(label_mask.flatten(0, 1), self.mix.gamma).double().sum()

    def _loss(
        self, batch: MicroBatch, phase: LossPhase, normaliser: float
    ) -> tuple[Tensor, Tensor]:
        drafter = self.config.drafter
        embeddings = block_embeddings(
            self.embedding, batch.anchor_tokens, drafter.mask_token_id, drafter.block_size
        )
        hidden = self.engine.forward(batch.features, embeddings, batch.layout)
        return micro_batch_loss(
            hidden,
            self.head.weight,
            self.head.relabel(batch),
            self.mix,
            phase,
            normaliser,
            self.config.train.head_chunk_rows,
        )
