"""The training run: feature shards in, checkpoints and a curve out. Stopped anywhere, the same command continues it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import torch

from common.distributed import Ranks, barrier, raise_together, sum_over_ranks
from common.files import only_writer, write_json
from common.progress import Progress
from configs.schema import Config
from drafter.model import Drafter
from target.head import TargetHead, load_target_head
from train.batches import Batcher, MicroBatch, accumulation_steps, prefetched
from train.checkpoint import TrainState
from train.clock import Clock, device_peak_tflops
from train.engine import DTYPES, Engine
from train.full_state import plain_drafter
from train.initialise import initial_drafter, require_same_target
from train.inputs import Inputs, read_inputs
from train.objective import BatchSums
from train.open_source import (
    Supply,
    open_supply,
    release_stream,
)
from train.resume import find_start
from train.schedule import is_decay_start, learning_rate, loss_share
from train.sources import SourceClosed
from train.step import StepOutcome, Stepper
from train.stop import StopRequest, leave
from train.tracking import Tracker
from train.validation import validate, validation_metrics
from train.vocabulary import streamed_head, training_head
from train.walks import WalkStarts, find_walk_starts
from train.watch.log import write_run_facts
from train.watch.page import write_run_page

logger = logging.getLogger(__name__)


def train_drafter(config: Config, ranks: Ranks) -> None:
    """Train to `train.steps`, from the newest checkpoint if there is one.

    Raises ValueError or FileNotFoundError, on every rank, if features, settings or checkpoints do not fit the recipe.
    """
    with contextlib.ExitStack() as held:
        with raise_together(ranks):
            inputs = read_inputs(config)
            if ranks.is_main:
                held.enter_context(only_writer(config.run.folder / ".train.lock"))
        _train(config, ranks, inputs)


def _train(config: Config, ranks: Ranks, inputs: Inputs) -> None:
    with raise_together(ranks):
        start = (
            find_start(inputs.checkpoints, inputs.settings, config.train) if ranks.is_main else None
        )
    first_step = int(sum_over_ranks(torch.tensor(float(start[0].step if start else 0))).item())
    if first_step == config.train.steps:
        logger.info("already trained: step %d in %s", first_step, inputs.checkpoints.folder)
        with raise_together(ranks):
            if ranks.is_main:
                release_stream(config, inputs.blocks, inputs.features)
        return
    with raise_together(ranks):
        drafter = initial_drafter(config)
        if ranks.is_main:
            inputs = replace(inputs, checkpoints=inputs.checkpoints.with_frozen(drafter))
        require_same_target(config, inputs.features)
        head = load_target_head(
            inputs.features.checked_head(), ranks.device, DTYPES[config.train.dtype]
        )
    with raise_together(ranks):
        supply = open_supply(config, inputs.features, inputs.blocks, ranks)
    run = Run(config, ranks, inputs, drafter, head, supply)
    with raise_together(ranks):
        if ranks.is_main:  # only now: a start that is refused must not have cost a checkpoint
            inputs.checkpoints.forget_after(first_step)
    run.train(first_step)


class Run:
    """What a run holds between steps."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        inputs: Inputs,
        drafter: Drafter,
        head: TargetHead,
        supply: Supply,
    ):
        self.config, self.ranks, self.inputs, self.head = config, ranks, inputs, head
        train = config.train
        num_micro_batches = train.global_batch_samples // train.micro_batch_samples
        is_packed = train.pack_tokens is not None  # then a step has as many as its documents fill
        if num_micro_batches % ranks.world_size and ranks.is_main and not is_packed:
            logger.warning(
                "%d micro-batches a step for %d ranks: some ranks idle; a multiple would be faster",
                num_micro_batches,
                ranks.world_size,
            )
        self.engine = Engine(
            drafter, train, ranks, accumulation_steps(num_micro_batches, ranks.world_size)
        )
        self.source = supply.source
        self.stop = StopRequest(self.source.close)
        self.stepper = Stepper(
            config,
            self.engine,
            head.embedding,
            streamed_head(head.head, inputs.blocks.plan.rows, train)
            if inputs.blocks
            else training_head(head.head, inputs.features, inputs.entries, train),
            self.stop,
        )
        self.batcher = Batcher(
            supply.source,
            supply.order,
            train,
            config.drafter.block_size,
            config.run.seed,
            ranks.rank,
            ranks.world_size,
        )
        self.state = TrainState()
        self.saved_step = 0
        self.tracker: Tracker | None = None
        self.clock = Clock(ranks.world_size, device_peak_tflops(train, ranks.device))

    def train(self, first_step: int) -> None:
        if first_step > 0:
            self.restore(first_step)
        self.saved_step = first_step
        self.source.trained(self.state.samples)
        if self.ranks.is_main:
            self.tracker = Tracker(self.config, self.state.wandb_run_id, first_step)
            self.state.wandb_run_id = self.tracker.wandb_run_id
            write_run_facts(self.config)
        steps = self.config.train.steps
        progress = Progress("train", steps, "steps", done=first_step)
        with self.stop:
            for batches in self.batches():
                outcome = self.stepper.accumulate(batches, self.state.step, self.state.mean_weight)
                self.require_finite(outcome)
                grad_norm = self.engine.step(learning_rate(self.state.step, self.config.train))
                self.count(outcome)
                self.source.trained(self.state.samples)
                if self.is_due(self.config.train.log_every):
                    self.log(grad_norm)
                with self.clock.paused():
                    accepted = (
                        self.evaluate() if self.is_due(self.config.train.eval_every) else None
                    )
                    if (
                        self.is_due(self.config.train.checkpoint_every)
                        or outcome.is_stopping
                        or is_decay_start(self.state.step, self.config.train)
                    ):
                        self.save(accepted)
                progress.advance(1, f"loss {outcome.sums.loss / outcome.sums.weight:.3f}")
                if outcome.is_stopping:
                    logger.info("stopped after step %d; it is saved", self.state.step)
                    outcome.leave()
            if self.state.step < steps:
                self.leave_waiting()
        progress.finish()
        if self.tracker:
            self.tracker.finish()
            write_run_page(self.config.run.folder)
        barrier()

    def restore(self, step: int) -> None:
        checkpoints = self.inputs.checkpoints
        [entry] = [entry for entry in checkpoints.entries() if entry.step == step]
        self.state, _ = checkpoints.read_state(entry)
        checkpoints.restore(entry, self.engine)
        logger.info("continuing after step %d of %d", step, self.config.train.steps)

    def batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of every step that is left; a row that cannot be read stops every rank.

        Ends early if the run is told to stop between two steps: while a rank waits for its source, or replays its walks.
        """
        count = self.config.train.global_batch_samples
        try:
            for steps in self.windows():
                first = self.state.samples
                positions = range(first, first + steps * count, count)
                loaded = prefetched(self.batcher.load, iter(positions), self.config.run.cpu_threads)
                for _ in positions:
                    batches = self.next_of(loaded)
                    if batches is None:
                        return
                    yield batches
        finally:
            self.source.close()  # first: the reading thread may wait for what will never come

    def next_of(self, loaded: Iterator[list[MicroBatch]]) -> list[MicroBatch] | None:
        """None on every rank if one has been told to stop while it waited."""
        batches = None
        with self.clock.waiting(), raise_together(self.ranks), contextlib.suppress(SourceClosed):
            batches = next(loaded)
        if self.config.train.source != "stream":  # nothing else waits
            return batches
        num_closed = sum_over_ranks(torch.tensor(float(batches is None)))
        return batches if num_closed == 0 else None

    def windows(self) -> Iterator[int]:
        """Steps until the anchors' walk starts are found anew, or all that are left; ends early if told to stop meanwhile."""
        train = self.config.train
        if train.anchors == "uniform":
            yield train.steps - self.state.step
            return
        every = train.walk_refresh_steps
        while self.state.step < train.steps:
            steps = min(every - self.state.step % every, train.steps - self.state.step)
            if self.state.step % every == 0:
                self.state.walk_starts = {}
            with self.clock.walking():
                found = self.find_walk_starts(steps)
            if found is None:
                return
            # a resumed run has them, but for steps it did not have when they were found (wsd, continued)
            self.state.walk_starts |= found
            self.batcher = replace(self.batcher, walk_starts=self.state.walk_starts)
            yield steps

    def find_walk_starts(self, steps: int) -> WalkStarts | None:
        """Of the documents of the next `steps` steps whose starts are not known yet; None if told to stop."""
        train = self.config.train
        count = steps * train.global_batch_samples
        samples = self.batcher.order.samples(self.state.samples, count)
        known = self.state.walk_starts
        entries = [sample.entry for sample in samples if sample.entry.sample_id not in known]
        if not entries:
            return {}
        return find_walk_starts(
            plain_drafter(self.engine),
            self.head.embedding,
            self.stepper.head,
            self.inputs.features,
            entries,
            train,
            self.ranks,
            lambda: self.stop.is_asked,
        )

    def require_finite(self, outcome: StepOutcome) -> None:
        """Raises ValueError on every rank, before the optimizer has moved."""
        if outcome.is_finite:
            return
        step = self.state.step + 1
        path = self.config.run.folder / "logs" / f"not-finite-step-{step}.json"
        samples = [sample.entry.sample_id for sample in self.batcher.samples(self.state.samples)]
        if self.ranks.is_main:
            write_json(path, {"step": step, "sample_ids": samples})
        raise ValueError(
            f"loss or gradient of step {step} is not finite; the optimizer has not moved and the last checkpoint is good. "
            f"The batch's sample ids are in {path}. The same command takes this step again; to go on with a lower "
            f"train.learning_rate or without these samples, give another run.output_dir "
            f"and train.init_from=<a checkpoint of {self.inputs.checkpoints.folder}>"
        )

    def count(self, outcome: StepOutcome) -> None:
        state, sums = self.state, outcome.sums
        state.mean_weight = sums.weight / sums.slots
        # a checkpoint from before a sum existed has a shorter window
        window = zip_longest(state.window, vars(sums).values(), fillvalue=0.0)
        state.window = [a + b for a, b in window]
        state.step += 1
        state.samples += self.config.train.global_batch_samples
        self.clock.steps += 1
        self.clock.tokens += sums.tokens
        self.clock.blocks += sums.blocks
        self.clock.flops += outcome.flops

    def is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.train.steps

    def log(self, grad_norm: float) -> None:
        """A line about the steps since the last one."""
        sums, step, walked_s = BatchSums(*self.state.window), self.state.step, self.clock.walked_s
        self.state.window = []
        metrics = {
            "train/loss": sums.loss / sums.weight,
            "train/mean_weight": sums.weight / sums.slots,
            "train/loss_share": loss_share(step - 1, self.config.train),
            "train/learning_rate": learning_rate(step - 1, self.config.train),
            "train/grad_norm": grad_norm,
            "train/chain_hits": sums.chain / sums.blocks,
            "train/epoch": self.state.samples / len(self.inputs.entries),
            **self.clock.lap(),
        }
        if sums.candidates:
            metrics["train/anchor_coverage"] = sums.blocks / sums.candidates
            metrics["train/padding"] = 1 - sums.context / sums.padded_context
        if self.config.train.anchors == "walk":
            metrics["train/walk_anchors"] = sums.at_starts / sums.blocks
            metrics["train/walk_s"] = walked_s
        if sums.tree_blocks:
            metrics["train/tree_hits"] = sums.tree / sums.tree_blocks
        if self.tracker:
            self.tracker.log(step, metrics)

    def evaluate(self) -> float | None:
        """Acceptance length of the tree at `train.tree_budget` on the validation rows; None without any."""
        start = time.monotonic()
        found = validate(
            plain_drafter(self.engine),
            self.head,
            self.inputs.features,
            self.inputs.validation,
            self.config,
            self.ranks,
        )
        metrics = validation_metrics(found, self.config.train.tree_budget)
        if not metrics:
            logger.warning(
                "no validation rows with a response of two tokens: best checkpoint unknown"
            )
            return None
        metrics["validation/time_s"] = time.monotonic() - start
        if self.tracker:
            self.tracker.log(self.state.step, metrics)
            write_run_page(self.config.run.folder)
        accepted = metrics[f"validation/tree_acceptance_{self.config.train.tree_budget}"]
        logger.info(
            "step %d: validation acceptance length %.3f chain, %.3f tree of %d",
            self.state.step,
            metrics["validation/chain_acceptance"],
            accepted,
            self.config.train.tree_budget,
        )
        return accepted

    def leave_waiting(self) -> None:
        """Told to stop between two steps."""
        if self.state.step > self.saved_step:
            self.save(None)
        said = f"after step {self.state.step}; it is saved" if self.state.step else "before step 1"
        logger.info("stopped %s", said)
        leave(sum_over_ranks(self.stop.received()))

    def save(self, accepted: float | None) -> None:
        self.inputs.checkpoints.save(
            self.engine,
            self.state,
            self.inputs.settings,
            accepted,
            is_decay_start(self.state.step, self.config.train),
            self.ranks,
        )
        self.saved_step = self.state.step
        self.source.saved(self.state.samples)
