"""A training step's tokens/s and memory: ours against the released `speculators` package's DFlash step, same shapes, one run.

    python -m bench.train_step [--full] [--output outputs/bench/train_step.json]

A step is forward, loss and backward of one packed row (two documents) from random weights of the same shapes; the optimizer,
equal for both, is left out. speculators runs as it is on a CPU: eager attention (its flex default has no backward there),
its eager cross-entropy (its fused one is a GPU kernel), 15 of 16 slots supervised as ours. It computes the target's logits in
the step, from the last hidden state; ours reads recorded labels, or with `kl` the stored 16 likeliest tokens. Memory is the
resident peak above weights and inputs, gradients included, each in a process of its own. About a minute on two idle cores;
--full adds a vocabulary of 248,320: some minutes and 8 GB. Without speculators it says so and measures ours alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.memory import peak_above_bytes
from common.files import write_json
from configs.schema import LossName
from data.soft_labels import SoftLabels
from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.masks import BlockLayout
from drafter.model import Drafter, block_embeddings
from train.batches import MicroBatch
from train.losses import LossMix
from train.objective import micro_batch_loss
from train.schedule import LossPhase

THEIRS = "speculators 0.9.0, ce"
OURS: dict[str, LossName] = {"ours, ce": "ce", "ours, kl of 16": "kl", "ours, tree of 64": "tree"}
TAPS, WINDOW, GAMMA, SOFT = 5, 512, 7.0, 16


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    context: int
    anchors: int
    block_size: int = 16


SMALL, LARGE = Shape(49_152, 576, 1024, 64), Shape(248_320, 1024, 1024, 32)


@dataclass(frozen=True)
class Row:
    case: str
    vocabulary: int
    hidden: int
    context: int
    anchors: int
    seconds: float
    tokens_per_s: float
    peak_mb: float
    speed_over_theirs: float | None
    """Median over rounds; null without speculators."""
    cpu_speed_over_theirs: float | None
    """The same in processor time, which other work on the machine hardly disturbs."""
    memory_over_theirs: float | None


class Inputs:
    """One packed row: two documents, all of their tokens response tokens."""

    def __init__(self, shape: Shape):
        generator = torch.Generator().manual_seed(0)
        half = shape.context // 2
        self.shape = shape
        self.features = torch.randn(1, shape.context, TAPS, shape.hidden, generator=generator)
        self.input_ids = torch.randint(shape.vocabulary, (1, shape.context), generator=generator)
        self.documents = torch.tensor([[0] * half + [1] * (shape.context - half)])
        self.positions = torch.cat([torch.arange(half), torch.arange(shape.context - half)])[None]
        self.embedding = torch.randn(shape.vocabulary, shape.hidden, generator=generator) * 0.02
        room = shape.context - shape.block_size
        order = torch.randperm(room, generator=generator)
        self.anchors = order[: shape.anchors].sort().values  # places in the row

    def micro_batch(self) -> MicroBatch:
        shape, at = self.shape, self.anchors
        layout = BlockLayout(
            self.positions, self.documents, self.positions[:, at], self.documents[:, at]
        )
        slots = at[:, None] + torch.arange(1, shape.block_size)
        mask = self.documents[0, slots] == self.documents[0, at][:, None]
        kept = torch.randint(shape.vocabulary, (1, *slots.shape, SOFT))
        soft = SoftLabels(kept, torch.full(kept.shape, -3.0))
        return MicroBatch(
            self.features, layout, self.input_ids[:, at], self.input_ids[:, slots[:]], mask[None],
            ("bench",), shape.context, soft=soft,
        )  # fmt: skip


def our_step(shape: Shape, loss: LossName) -> Callable[[], None]:
    inputs = Inputs(shape)
    drafter = Drafter(our_config(shape))
    batch = inputs.micro_batch()
    mix = LossMix({loss: 1.0}, GAMMA)

    def step() -> None:
        drafter.zero_grad(set_to_none=True)
        blocks = block_embeddings(inputs.embedding, batch.anchor_tokens, 0, shape.block_size)
        hidden = drafter(batch.features, blocks, batch.layout)
        value, _ = micro_batch_loss(
            hidden, inputs.embedding, batch, mix, LossPhase(), float(batch.num_slots), 1024
        )
        value.backward()

    return step


def our_config(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden, num_layers=3, intermediate_size=3 * shape.hidden,
        num_attention_heads=shape.hidden // 64, num_key_value_heads=shape.hidden // 64,
        head_dim=64, vocab_size=shape.vocabulary, block_size=shape.block_size, mask_token_id=0,
        target_layer_ids=(1, 8, 14, 20, 27), layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=WINDOW, rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=4096,
        num_target_layers=30,
    )  # fmt: skip


def their_step(shape: Shape) -> Callable[[], None]:
    """Loads nothing from a hub: its weights are set as ours are."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    ours, inputs = our_config(shape), Inputs(shape)
    layers = Qwen3Config(
        hidden_size=ours.hidden_size, num_hidden_layers=ours.num_layers,
        intermediate_size=ours.intermediate_size, num_attention_heads=ours.num_attention_heads,
        num_key_value_heads=ours.num_key_value_heads, head_dim=ours.head_dim,
        vocab_size=ours.vocab_size, layer_types=list(ours.layer_types), use_sliding_window=True,
        sliding_window=WINDOW, max_position_embeddings=4096,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=shape.vocabulary,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=list(ours.target_layer_ids),
            mask_token_id=0,
        )
    ).float()
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        part.weight = torch.nn.Parameter(inputs.embedding, requires_grad=False)  # shared, as ours
    last_hidden = torch.randn(1, shape.context, shape.hidden)
    loss_config = resolve_loss_config("ce", "eager")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        _, loss, _ = model(
            hidden_states=inputs.features.flatten(2),
            input_ids=inputs.input_ids,
            loss_mask=torch.ones_like(inputs.input_ids),
            verifier_last_hidden_states=last_hidden,
            document_ids=inputs.documents,
            position_ids=inputs.positions,
            loss_config=loss_config,
            gamma=GAMMA,
            max_anchors=shape.anchors,
        )
        loss.backward()

    return step


def make_step(case: str, shape: Shape) -> Callable[[], None]:
    return their_step(shape) if case == THEIRS else our_step(shape, OURS[case])


def peak_of(case: str, shape: Shape, threads: int) -> int:
    torch.set_num_threads(threads)
    tiny = Shape(512, 64, 64, 4, shape.block_size)
    make_step(case, tiny)()  # what a first step loads is not counted
    return peak_above_bytes(make_step(case, shape))


def measure(shape: Shape, rounds: int, threads: int) -> list[Row]:
    cases = [*([THEIRS] if has_speculators() else []), *OURS]
    steps = {case: make_step(case, shape) for case in cases}
    took: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, step in steps.items():
            start, cpu = time.perf_counter(), time.process_time()
            step()
            if number:  # the first round warms up
                took[case].append((time.perf_counter() - start, time.process_time() - cpu))
    del steps
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(case, shape, threads) for case in cases]
        peaks = dict(zip(cases, pool.starmap(peak_of, jobs, chunksize=1), strict=True))
    return [_row(case, shape, took, peaks) for case in cases]


def _row(
    case: str, shape: Shape, took: dict[str, list[tuple[float, float]]], peaks: dict[str, int]
) -> Row:
    def over_theirs(clock: int) -> float | None:
        if THEIRS not in took:
            return None
        pairs = zip(took[THEIRS], took[case], strict=True)
        return round(statistics.median(theirs[clock] / own[clock] for theirs, own in pairs), 2)

    seconds = statistics.median(wall for wall, _ in took[case])
    return Row(
        case=case,
        vocabulary=shape.vocabulary,
        hidden=shape.hidden,
        context=shape.context,
        anchors=shape.anchors,
        seconds=round(seconds, 3),
        tokens_per_s=round(shape.context / seconds, 1),
        peak_mb=round(peaks[case] / 1e6, 1),
        speed_over_theirs=over_theirs(0),
        cpu_speed_over_theirs=over_theirs(1),
        memory_over_theirs=round(peaks[case] / peaks[THEIRS], 3) if THEIRS in peaks else None,
    )


def has_speculators() -> bool:
    return importlib.util.find_spec("speculators") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also a vocabulary of 248,320")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/train_step.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not has_speculators():
        print(
            "speculators is not installed: ours alone. `pip install --no-deps speculators==0.9.0`"
        )
    shapes = [SMALL, LARGE] if options.full else [SMALL]
    rows = [row for shape in shapes for row in measure(shape, options.rounds, options.threads)]
    machine = f"{os.cpu_count()} cores, {options.threads} torch threads, torch {torch.__version__}"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        options.output,
        {"name": "train_step", "machine": machine, "rows": [asdict(row) for row in rows]},
    )
    print(f"train_step on {machine}")
    names = ["case", "V", "H", "s", "tokens/s", "peak MB", "speed", "cpu speed", "memory"]
    widths = [23, 9, 6, 8, 10, 10, 8, 11, 8]
    print(
        "".join(
            f"{n:<{w}}" if n == "case" else f"{n:>{w}}" for n, w in zip(names, widths, strict=True)
        )
    )
    for row in rows:
        values = [
            row.vocabulary, row.hidden, row.seconds, row.tokens_per_s, row.peak_mb,
            row.speed_over_theirs, row.cpu_speed_over_theirs, row.memory_over_theirs,
        ]  # fmt: skip
        cells = (f"{'-' if v is None else v:>{w}}" for v, w in zip(values, widths[1:], strict=True))
        print(f"{row.case:<{widths[0]}}{''.join(cells)}")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
