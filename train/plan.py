"""Steps and memory of a training run, before anything runs. Loads no model and no torch.

Memory is an estimate from formulas (below, each a line), for the largest micro-batch: a pack of train.pack_tokens tokens, or
train.micro_batch_samples documents of train.max_tokens. It leaves out the allocator's fragments and the CUDA context, about 2 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config
from data.corpus import CorpusManifest, manifest_path, read_corpus_manifest
from drafter.config import default_target_layer_ids, drafter_config
from extract.footprint import ASSUMED_FLOPS, ASSUMED_GPU, FILLS_A_GPU
from extract.plan import format_bytes
from train.flops import train_flops, work_of_blocks

GPU_COUNTS = (1, 4, 8)
BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class TrainPlan:
    config: Config
    num_samples: int | None
    """Training rows; None: nothing says it."""
    mean_tokens: float | None
    mean_response_tokens: float | None

    @property
    def num_parameters(self) -> int:
        """Of the drafter: what is trained, reduced and saved."""
        drafter, hidden = self.config.drafter, self.config.target.hidden_size
        queries = drafter.num_attention_heads * drafter.head_dim
        keys = drafter.num_key_value_heads * drafter.head_dim
        attention = hidden * (2 * queries + 2 * keys) + 2 * drafter.head_dim
        layer = attention + 3 * hidden * drafter.intermediate_size + 2 * hidden
        fc = len(drafter.target_layer_ids) * hidden * hidden
        return drafter.num_layers * layer + fc + 2 * hidden

    @property
    def checkpoint_bytes(self) -> int:
        """Float32 weights and both moments."""
        return 12 * self.num_parameters

    @property
    def checkpoints_bytes(self) -> int:
        """On disk at the worst moment: those kept, the best, the start of the decay, and one being written."""
        return (self.config.train.keep_checkpoints + 3) * self.checkpoint_bytes

    @property
    def value_bytes(self) -> int:
        return 2 if self.config.train.dtype == "bfloat16" else 4

    @property
    def epochs(self) -> float | None:
        train = self.config.train
        if not self.num_samples:
            return None
        return train.steps * train.global_batch_samples / self.num_samples

    @property
    def mean_anchors(self) -> float | None:
        """Blocks a document: at most one an adjacent pair of response tokens."""
        if self.mean_response_tokens is None:
            return None
        return min(self.config.train.num_anchors, max(0.0, self.mean_response_tokens - 1))

    def state_bytes(self, zero_stage: int, num_gpus: int) -> float:
        """Weights, gradients, float32 masters and moments on one GPU."""
        size, value = self.num_parameters, self.value_bytes
        shared = num_gpus if zero_stage > 0 else 1
        has_masters = value == 2 or zero_stage > 0
        optimizer = size * (8 + (4 if has_masters else 0)) / shared
        weights = size * value / (num_gpus if zero_stage == 3 else 1)
        bucket = value * min(size, BUCKET_ELEMENTS)
        if zero_stage == 0:
            gradients = size * value
        elif zero_stage == 1:  # bf16: accumulated in float32 beside the backward's own
            gradients = size * (value + 4) if value == 2 else size * value
        else:
            gradients = size * 4 / num_gpus + bucket
        return weights + gradients + optimizer

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

    def gpu_bytes(self, zero_stage: int, num_gpus: int) -> float:
        rest = self.activation_bytes + self.ends_bytes + self.chunk_bytes
        return self.state_bytes(zero_stage, num_gpus) + rest

    @property
    def step_flops(self) -> float | None:
        """Of one optimizer step, without what activation checkpointing repeats; None: no lengths known."""
        if self.mean_tokens is None or self.mean_response_tokens is None or not self.mean_anchors:
            return None
        drafter, train = drafter_config(self.config), self.config.train
        tokens = min(self.mean_tokens, train.max_tokens)
        middle = max(0.0, tokens - min(self.mean_response_tokens, tokens) / 2)
        anchors = [middle] * round(self.mean_anchors)
        work = work_of_blocks(drafter, tokens, anchors, drafter.block_size - 1)
        return train.global_batch_samples * train_flops(drafter, work, drafter.vocab_size)

    def hours(self, num_gpus: int) -> float | None:
        """At the speed that a plan assumes of a GPU; None for a drafter too small to fill one, or unknown lengths."""
        if self.step_flops is None or self.num_parameters < FILLS_A_GPU / 4:
            return None
        repeated = 4 / 3 if self.config.train.activation_checkpointing else 1.0
        seconds = self.config.train.steps * self.step_flops * repeated / ASSUMED_FLOPS
        return seconds / num_gpus / 3600

    def lines(self) -> list[str]:
        """The plan as text, a fact a line."""
        train = self.config.train
        return [
            f"drafter: {self.num_parameters:,} parameters, {train.dtype}",
            f"checkpoint: {format_bytes(self.checkpoint_bytes)} (float32 weights and moments), "
            f"{train.keep_checkpoints} kept besides the best and the start of the decay: {format_bytes(self.checkpoints_bytes)}",
            self._taps_line(),
            self._steps_line(),
            self._step_line(),
            *self._hours_lines(),
            f"logits: {format_bytes(self.whole_logits_bytes)} a micro-batch if they existed, "
            f"{format_bytes(self.chunk_bytes)} alive at once (train.head_chunk_rows={train.head_chunk_rows})",
            f"memory of a GPU beside weights and optimizer: activations {format_bytes(self.activation_bytes)}, "
            f"embedding and head {format_bytes(self.ends_bytes)}, logits {format_bytes(self.chunk_bytes)}",
            "memory of a GPU, all (estimate):",
            *self._memory_table(),
        ]

    def _taps_line(self) -> str:
        taps = self.config.drafter.target_layer_ids
        usual = default_target_layer_ids(self.config.target.num_layers, len(taps))
        note = (
            "as released drafters have them"
            if taps == usual
            else f"released drafters: {list(usual)}"
        )
        return f"taps: outputs of 0-based target layers {list(taps)} ({note})"

    def _steps_line(self) -> str:
        train = self.config.train
        samples = train.steps * train.global_batch_samples
        if self.epochs is None or self.num_samples is None:
            return f"steps: {train.steps:,} of {train.global_batch_samples} samples: {samples:,} samples"
        return (
            f"steps: {train.steps:,} of {train.global_batch_samples} samples: {self.epochs:.2f} epochs "
            f"of {self.num_samples:,} training samples"
        )

    def _step_line(self) -> str:
        batch = self.config.train.global_batch_samples
        if self.mean_tokens is None or self.mean_anchors is None:
            return f"a step: at most {batch * self.config.train.num_anchors:,} anchors"
        tokens = batch * min(self.mean_tokens, self.config.train.max_tokens)
        anchors = batch * self.mean_anchors
        drafted = anchors * (self.config.drafter.block_size - 1)
        return f"a step: about {tokens:,.0f} tokens, {anchors:,.0f} anchors, {drafted:,.0f} drafted slots"

    def _hours_lines(self) -> list[str]:
        if self.step_flops is None or self.hours(1) is None:
            return []
        taken = ", ".join(f"{count} GPU {self.hours(count):,.1f} h" for count in GPU_COUNTS)
        return [
            f"hours (a guess: {ASSUMED_GPU}): {taken}; {self.step_flops / 1e15:.2f} PFLOP a step",
        ]

    def _memory_table(self) -> list[str]:
        head = "  ZeRO " + "".join(f"{f'{count} GPU':>12}" for count in GPU_COUNTS)
        rows = []
        for stage in range(4):
            cells = "".join(f"{format_bytes(self.gpu_bytes(stage, n)):>12}" for n in GPU_COUNTS)
            mark = "  <- this recipe" if stage == self.config.train.zero_stage else ""
            rows.append(f"  {stage:<5}{cells}{mark}")
        return [head, *rows]


def plan_train(config: Config, corpus: CorpusManifest | None = None) -> TrainPlan:
    """For `corpus`, else the run's finished corpus, else the size the recipe states."""
    data, folder = config.data, config.run.folder / "corpus"
    if corpus is None and manifest_path(folder).is_file():
        corpus = read_corpus_manifest(folder)
    if corpus is not None and corpus.num_rows:
        responses = sum(shard.num_response_tokens for shard in corpus.shards)
        return TrainPlan(
            config,
            corpus.counts["total"]["done"]["train"],
            corpus.num_tokens / corpus.num_rows,
            responses / corpus.num_rows,
        )
    kept = 1 - data.validation_fraction - data.test_fraction
    return TrainPlan(
        config,
        None if data.num_samples is None else round(data.num_samples * kept),
        data.expected_tokens,
        data.expected_response_tokens,
    )
