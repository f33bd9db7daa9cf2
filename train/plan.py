"""Steps, hours and memory (train/memory.py) of a training run, before anything runs. Loads no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from configs.schema import Config
from data.corpus import CorpusManifest, manifest_path, read_corpus_manifest
from drafter.config import default_target_layer_ids, drafter_config
from drafter.shapes import expected_shapes
from extract.footprint import ASSUMED_FLOPS, ASSUMED_GPU, FILLS_A_GPU
from extract.plan import format_bytes
from train.flops import Work, draft_flops, train_flops, work_of_blocks
from train.freeze import frozen_names
from train.memory import GPU_COUNTS, SPARE, TrainMemory

ASSUMED_ACCEPTANCE = 4.0
"""Tokens a verify pass, of a drafter in training: how many passes train.anchors=walk drafts again."""


@dataclass(frozen=True)
class TrainPlan:
    config: Config
    num_samples: int | None
    """Training rows; None: nothing says it."""
    mean_tokens: float | None
    mean_response_tokens: float | None

    @property
    def memory(self) -> TrainMemory:
        return TrainMemory(self.config)

    @property
    def num_parameters(self) -> int:
        """Of the drafter."""
        return self.memory.num_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Float32 weights and moments of what is trained."""
        return 4 * self.memory.num_trained + self.memory.moment_bytes

    @property
    def checkpoints_bytes(self) -> int:
        """On disk at the worst moment: those kept, the best, the start of the decay, and one being written."""
        return (self.config.train.keep_checkpoints + 3) * self.checkpoint_bytes

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

    def gpu_bytes(self, zero_stage: int, num_gpus: int) -> float:
        """At the worst moment of a step, with the recipe's offload where the stage has it."""
        sharding = replace(self.memory.sharding, zero_stage=zero_stage)
        return self.memory.gpu_bytes(sharding, num_gpus)

    @property
    def step_flops(self) -> float | None:
        """Of one optimizer step, without what activation checkpointing repeats; None: no lengths known."""
        drafter, train = drafter_config(self.config), self.config.train
        work = self._work(self.mean_anchors or 0)
        if work is None:
            return None
        frozen = frozen_names(train.freeze, list(expected_shapes(drafter)))
        return train.global_batch_samples * train_flops(drafter, work, drafter.vocab_size, frozen)

    @property
    def walk_flops(self) -> float:
        """Of drafting a step's documents again, pass by pass (train.anchors=walk); 0 without."""
        drafter, train = drafter_config(self.config), self.config.train
        work = self._work((self.mean_response_tokens or 0) / ASSUMED_ACCEPTANCE)
        if work is None or train.anchors == "uniform":
            return 0.0
        return train.global_batch_samples * draft_flops(drafter, work, drafter.vocab_size)

    def _work(self, num_blocks: float) -> Work | None:
        """Of a mean document; None: no lengths known, or nothing to draft."""
        if self.mean_tokens is None or self.mean_response_tokens is None or not num_blocks:
            return None
        drafter = drafter_config(self.config)
        tokens = min(self.mean_tokens, self.config.train.max_tokens)
        middle = max(0.0, tokens - min(self.mean_response_tokens, tokens) / 2)
        anchors = [middle] * round(num_blocks)
        return work_of_blocks(drafter, tokens, anchors, drafter.block_size - 1)

    def hours(self, num_gpus: int) -> float | None:
        """At the speed that a plan assumes of a GPU; None for a drafter too small to fill one, or unknown lengths."""
        if self.step_flops is None or self.num_parameters < FILLS_A_GPU / 4:
            return None
        repeated = 4 / 3 if self.config.train.activation_checkpointing else 1.0
        flops = self.step_flops * repeated + self.walk_flops
        seconds = self.config.train.steps * flops / ASSUMED_FLOPS
        return seconds / num_gpus / 3600

    def lines(self) -> list[str]:
        """The plan as text, a fact a line."""
        train, memory = self.config.train, self.memory
        return [
            f"drafter: {self.num_parameters:,} parameters, {train.dtype}",
            f"checkpoint: {format_bytes(self.checkpoint_bytes)} (float32 weights and moments), "
            f"{train.keep_checkpoints} kept besides the best and the start of the decay: {format_bytes(self.checkpoints_bytes)}",
            self._taps_line(),
            self._steps_line(),
            self._step_line(),
            *self._hours_lines(),
            f"logits: {format_bytes(memory.whole_logits_bytes)} a micro-batch if they existed, "
            f"{format_bytes(memory.chunk_bytes)} alive at once (train.head_chunk_rows={train.head_chunk_rows})",
            f"memory of a GPU beside weights and optimizer: activations {format_bytes(memory.activation_bytes)}, "
            f"embedding and head {format_bytes(memory.ends_bytes)}, logits {format_bytes(memory.chunk_bytes)}",
            f"memory of a GPU, all (estimate), and the number of cards of a kind it fits with {SPARE:.0%} to spare:",
            *(f"  {line}" for line in memory.table()),
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
        step = f"{self.step_flops / 1e15:.2f} PFLOP a step"
        if self.walk_flops:
            share = f"{self.walk_flops / self.step_flops:.0%} more for walk starts"
            step += f" and {share} (a guess: {ASSUMED_ACCEPTANCE:g} tokens a pass)"
        return [f"hours (a guess: {ASSUMED_GPU}): {taken}; {step}"]


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
