"""Memory of a training run by formula, a line each, for the largest micro-batch. Loads no model and no torch.

The allocator's fragments and the CUDA context are left out; `fits` leaves room for them. One byte count is of one GPU, `host`
of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from configs.schema import Config
from drafter.config import drafter_config
from drafter.shapes import expected_shapes
from train.freeze import frozen_names

Offload = Literal["optimizer", "all"] | None
GPU_COUNTS = (1, 4, 8)
CARDS = {"80 GB": 80_000_000_000, "H200": 141_000_000_000}
"""Bytes by the cards' own name plates."""
CUDA_BYTES, SPARE = 2_000_000_000, 0.1
"""What a process keeps for CUDA and its libraries, and the share of a card for the allocator's fragments."""
BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class Sharding:
    zero_stage: int
    offload: Offload = None

    def __str__(self) -> str:
        return f"{self.zero_stage}" + (f" offload {self.offload}" if self.offload else "")


SHARDINGS = (*(Sharding(stage) for stage in range(4)), Sharding(2, "optimizer"), Sharding(3, "all"))


@dataclass(frozen=True)
class TrainMemory:
    config: Config

    @property
    def sharding(self) -> Sharding:
        """The recipe's."""
        return Sharding(self.config.train.zero_stage, self.config.train.offload)

    @property
    def num_parameters(self) -> int:
        """Of the drafter."""
        return sum(self._sizes().values())

    @property
    def num_trained(self) -> int:
        """What is reduced, optimized and saved."""
        return sum(self._trained().values())

    @property
    def value_bytes(self) -> int:
        return 2 if self.config.train.dtype == "bfloat16" else 4

    @property
    def moment_bytes(self) -> int:
        """AdamW's two float32 moments a parameter, Muon's one a matrix."""
        muon = self.config.train.optimizer == "muon"
        shapes = expected_shapes(drafter_config(self.config))
        return sum(
            size * (4 if muon and len(shapes[name]) == 2 else 8)
            for name, size in self._trained().items()
        )

    def state_bytes(self, sharding: Sharding, num_gpus: int) -> float:
        """Weights, gradients, float32 masters and moments on one GPU."""
        size, value, stage = self.num_trained, self.value_bytes, sharding.zero_stage
        shared = num_gpus if stage > 0 else 1
        has_masters = value == 2 or stage > 0
        optimizer = (self.moment_bytes + (4 * size if has_masters else 0)) / shared
        weights = self.num_parameters * value / (num_gpus if stage == 3 else 1)
        bucket = value * min(size, BUCKET_ELEMENTS)
        if stage == 0:
            gradients = size * value
        elif sharding.offload:  # accumulated in host memory
            gradients = size * value if stage == 1 else bucket
        elif stage == 1:  # bf16: accumulated in float32 beside the backward's own
            gradients = size * (value + 4) if value == 2 else size * value
        else:
            gradients = size * 4 / num_gpus + bucket
        if sharding.offload:
            optimizer = 0
        if sharding.offload == "all":  # the layer at work, and the one that is fetched meanwhile
            weights = 2 * value * max(self._layer_sizes())
        return weights + gradients + optimizer

    def step_bytes(self, sharding: Sharding, num_gpus: int) -> float:
        """What an optimizer step makes beside that, when activations are gone: gradients in float32."""
        if sharding.offload or (sharding.zero_stage == 1 and self.value_bytes == 2):
            return 0
        if sharding.zero_stage == 0:
            return 4 * self.num_trained if self.value_bytes == 2 else 0
        return 4 * self.num_trained / num_gpus

    def host_bytes(self, sharding: Sharding) -> int:
        """Of a machine that holds all ranks: masters, moments, gradients in float32 and a copy in the compute dtype."""
        if not sharding.offload:
            return 0
        held = self.num_trained * (4 + 4 + self.value_bytes) + self.moment_bytes
        return held + (self.num_parameters * self.value_bytes if sharding.offload == "all" else 0)

    def gpu_bytes(self, sharding: Sharding, num_gpus: int) -> float:
        """At the worst moment of a step."""
        forward = self.activation_bytes + self.chunk_bytes
        most = max(forward, self.step_bytes(sharding, num_gpus))
        return self.state_bytes(sharding, num_gpus) + self.ends_bytes + most

    def fits(self, sharding: Sharding, num_gpus: int, card_bytes: int) -> bool:
        return self.gpu_bytes(sharding, num_gpus) + CUDA_BYTES <= (
            1 - SPARE
        ) * card_bytes and self.is_possible(sharding)

    def is_possible(self, sharding: Sharding) -> bool:
        """Muon needs whole matrices (configs/schema.py)."""
        whole = sharding.zero_stage == 0 or (sharding.zero_stage == 1 and self.value_bytes == 2)
        return self.config.train.optimizer != "muon" or (whole and not sharding.offload)

    @property
    def activation_bytes(self) -> float:
        """What the drafter keeps for backward: per block slot and layer, and per context token."""
        drafter, hidden, train = (
            self.config.drafter,
            self.config.target.hidden_size,
            self.config.train,
        )
        queries = drafter.num_attention_heads * drafter.head_dim
        keys = drafter.num_key_value_heads * drafter.head_dim
        slots = self.forward_blocks * drafter.block_size
        layer = slots * (5 * hidden + 4 * queries + 4 * keys + 4 * drafter.intermediate_size)
        layers = drafter.num_layers
        kept = layer + layers * slots * hidden if train.activation_checkpointing else layers * layer
        per_token = (len(drafter.target_layer_ids) + 3) * hidden + 4 * keys * layers
        context = self.forward_tokens * per_token
        return self.value_bytes * (kept + context)

    @property
    def forward_tokens(self) -> int:
        """Context tokens of the largest forward: a pack, or a micro-batch of the longest documents."""
        train = self.config.train
        return train.pack_tokens or train.micro_batch_samples * train.max_tokens

    @property
    def forward_blocks(self) -> int:
        train = self.config.train
        return train.pack_blocks or train.micro_batch_samples * train.num_anchors

    @property
    def ends_bytes(self) -> int:
        """The target's frozen embedding and head, untied."""
        return 2 * self.config.target.vocab_size * self.config.target.hidden_size * self.value_bytes

    @property
    def chunk_bytes(self) -> int:
        """Logits alive at once: in the compute dtype, in float32, and as probabilities."""
        rows = self.config.train.head_chunk_rows
        return rows * self.config.target.vocab_size * (8 if self.value_bytes == 2 else 4)

    @property
    def whole_logits_bytes(self) -> int:
        """What the logits of one micro-batch would take if they existed."""
        slots = self.config.drafter.block_size - 1
        return self.forward_blocks * slots * self.config.target.vocab_size * self.value_bytes

    def table(self) -> Iterator[str]:
        """A line a way to cut the drafter: bytes of a GPU by their number, and the cards that hold it."""
        names = "".join(f"  {'fits ' + card:<14}" for card in CARDS)
        counts = "".join(f"{f'{count} GPU':>10}" for count in GPU_COUNTS)
        yield (f"{'ZeRO':<21}" + counts + names).rstrip()
        rows = SHARDINGS if self.sharding in SHARDINGS else (*SHARDINGS, self.sharding)
        for sharding in rows:
            if self.is_possible(sharding):
                mark = "  <- this recipe" if sharding == self.sharding else ""
                yield (self._row(sharding) + mark).rstrip()
        host = self.host_bytes(self.sharding)
        if host:
            yield f"train.offload={self.sharding.offload}: {host / 1e9:.1f} GB of host memory for all ranks together"

    def _row(self, sharding: Sharding) -> str:
        sizes = [f"{self.gpu_bytes(sharding, count) / 1e9:.1f} GB" for count in GPU_COUNTS]
        fits = [
            ", ".join(str(n) for n in GPU_COUNTS if self.fits(sharding, n, size)) or "none"
            for size in CARDS.values()
        ]
        return (
            f"{sharding!s:<21}"
            + "".join(f"{s:>10}" for s in sizes)
            + "".join(f"  {f:<14}" for f in fits)
        )

    def _sizes(self) -> dict[str, int]:
        shapes = expected_shapes(drafter_config(self.config))
        return {name: prod(shape) for name, shape in shapes.items()}

    def _trained(self) -> dict[str, int]:
        sizes = self._sizes()
        frozen = frozen_names(self.config.train.freeze, list(sizes))
        return {name: size for name, size in sizes.items() if name not in frozen}

    def _layer_sizes(self) -> list[int]:
        sizes = self._sizes()
        count = self.config.drafter.num_layers
        own = [
            sum(s for n, s in sizes.items() if n.startswith(f"layers.{i}.")) for i in range(count)
        ]
        return [*own, sizes["fc.weight"]]
