"""The mission's other costs at its own sizes, with random weights: the target's prefill, a draft, a training step.

    python -m bench.mission_layers [--config configs/qwen3.6-27b.yaml] [--device cuda] [--dry]

The target has four of the recipe's layers (three Gated DeltaNet, one of full attention); tokens/s of the whole target are
those of the four layers over a quarter of the recipe's layer count, what `extract.tokens_per_s` wants to know. The drafter
is whole. A training step is forward and backward of one document with the recipe's anchors and loss, without the optimizer.
--dry: toy sizes, to see that it runs. Times are medians over rounds; peaks are the allocator's, on CUDA only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.tree_verify import machine, milliseconds, random_hybrid
from common.files import write_json
from configs.load import load_config
from configs.schema import Config
from drafter.cache import ContextCache, draft
from drafter.config import drafter_config
from drafter.masks import BlockLayout
from drafter.model import Drafter
from target.taps import forward_with_taps
from train.batches import MicroBatch
from train.losses import LossMix
from train.objective import micro_batch_loss
from train.schedule import LossPhase

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """What is run of the recipe."""

    target: str
    """Of bench.tree_verify."""
    prefill: tuple[int, int]
    """Sequences and tokens each, of a target forward."""
    context: int
    """Tokens behind a draft, and of the training document."""
    anchors: int


MISSION = Sizes("qwen3.6-27b", (8, 2048), 2048, 512)
DRY = Sizes("tiny", (2, 32), 48, 6)


@dataclass(frozen=True)
class Row:
    case: str
    tokens: int
    """Target tokens, drafted tokens, or supervised slots."""
    ms: float
    tokens_per_s: float
    """Of the whole model; of the target, layers that were not run included."""
    peak_gb: float | None


class Bench:
    def __init__(self, config: Config, sizes: Sizes, device: torch.device):
        self.config, self.sizes, self.device = config, sizes, device
        self.dtype = _DTYPES[config.train.dtype]
        self.generator = torch.Generator(device).manual_seed(0)

    def prefill(self) -> Row:
        target = random_hybrid(self.sizes.target, self.device, _DTYPES[self.config.target.dtype])
        rows, length = self.sizes.prefill
        ids = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        ids.random_(target.vocab_size, generator=self.generator)
        lengths = torch.full((rows,), length)
        share = target.num_layers / self.config.target.num_layers
        return self._row(
            "target prefill, features",
            rows * length,
            lambda: forward_with_taps(target, ids, lengths, (0, 2), need_last_hidden=True),
            share,
        )

    def draft(self) -> Row:
        drafter = self._drafter().eval().requires_grad_(False)
        cache = ContextCache(drafter, self.sizes.context + drafter.config.block_size)
        cache.append([self._features(drafter)])
        block = self._normal(1, drafter.config.block_size, drafter.config.hidden_size)
        num_slots = drafter.config.block_size - 1
        return self._row("draft of one block", num_slots, lambda: draft(drafter, cache, block))

    def train_step(self) -> Row:
        drafter = self._drafter()
        head = self._normal(self.config.target.vocab_size, drafter.config.hidden_size)
        head *= drafter.config.hidden_size**-0.5
        batch = self._batch(drafter)
        mix = LossMix.from_recipe(self.config)
        blocks = self._normal(
            1, self.sizes.anchors, drafter.config.block_size, drafter.config.hidden_size
        )

        def run() -> None:
            hidden = drafter(batch.features, blocks, batch.layout)
            chunk_rows = self.config.train.head_chunk_rows
            loss, _ = micro_batch_loss(
                hidden, head, batch, mix, LossPhase(), batch.num_slots, chunk_rows
            )
            loss.backward()
            drafter.zero_grad()

        return self._row(
            f"training step, {self.sizes.anchors} anchors, loss {'+'.join(mix.losses)}",
            batch.num_slots,
            run,
        )

    def _drafter(self) -> Drafter:
        with self.device:
            return Drafter(drafter_config(self.config)).to(self.dtype)

    def _features(self, drafter: Drafter) -> Tensor:
        """(S, D, H)"""
        taps = len(drafter.config.target_layer_ids)
        return self._normal(self.sizes.context, taps, drafter.config.hidden_size)

    def _batch(self, drafter: Drafter) -> MicroBatch:
        length, anchors, slots = (
            self.sizes.context,
            self.sizes.anchors,
            drafter.config.block_size - 1,
        )
        places = torch.arange(length, device=self.device)[None]
        starts = torch.linspace(1, length - slots - 1, anchors, device=self.device).long()[None]
        labels = torch.zeros(1, anchors, slots, dtype=torch.int64, device=self.device)
        labels.random_(self.config.target.vocab_size, generator=self.generator)
        return MicroBatch(
            features=self._features(drafter)[None],
            layout=BlockLayout(places, torch.zeros_like(places), starts, torch.zeros_like(starts)),
            anchor_tokens=starts,
            labels=labels,
            label_mask=torch.ones_like(labels, dtype=torch.bool),
            sample_ids=("bench",),
            num_tokens=length,
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def _row(self, case: str, tokens: int, run: Callable[[], object], share: float = 1.0) -> Row:
        """`share`: of the whole model's layers that were run."""
        on_gpu = self.device.type == "cuda"
        run()  # compiles and allocates
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        ms = statistics.median(milliseconds(run, self.device) for _ in range(5))
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9 if on_gpu else None
        return Row(
            case,
            tokens,
            round(ms, 2),
            round(1e3 * tokens * share / ms, 1),
            None if peak is None else round(peak, 2),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/qwen3.6-27b.yaml"))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dry", action="store_true", help="toy sizes of configs/debug.yaml")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/mission_layers.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(Path("configs/debug.yaml") if options.dry else options.config)
    bench = Bench(config, DRY if options.dry else MISSION, options.device)
    rows: list[Row] = []
    for measure in (bench.prefill, bench.draft, bench.train_step):
        rows.append(measure())
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # the next peak is its own
    result = {"name": "mission_layers", "machine": machine(options.device), "dry": options.dry}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, result | {"rows": [asdict(row) for row in rows]})
    print(f"mission_layers on {result['machine']}")
    print(f"{'case':<46}{'tokens':>8}{'ms':>10}{'tokens/s':>12}{'peak GB':>9}")
    for row in rows:
        peak = "-" if row.peak_gb is None else row.peak_gb
        print(f"{row.case:<46}{row.tokens:>8}{row.ms:>10}{row.tokens_per_s:>12}{peak:>9}")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
