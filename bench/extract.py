"""Extraction beside the target's bare forward and beside a padded batch loop, on the same rows, in one run.

    python -m bench.extract [--config configs/smollm2.yaml] [--device cuda] [--lengths configs/qwen3.6-27b.yaml] [--shrink 8]

`bare` is the target's forward over the batches that extraction makes, nothing copied, checked or stored: the speed of light.
`extract` is a worker as the stage runs it, claims, checks, codec, sums and files on disk included, target already loaded.
`naive` is what is written first: batches of --naive-batch rows in corpus order, padded to their longest, all layers, the hidden
states of the taps copied to the host and saved, a file a row, then the next batch.

Rows have random ids and the lengths of a recipe's mix (or of a corpus folder), divided by --shrink so that a CPU gets through
them. Sides alternate; medians over rounds. `cpu` columns are processor time of all threads: on a busy machine trust those.

Bars: extract at least 0.9 of bare and at least 2 times naive.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bench.tree_verify import machine
from common.files import write_json
from common.storage import LocalStorage
from configs.load import load_config
from configs.schema import Config
from data.corpus import CorpusRow, read_corpus_manifest, write_corpus
from data.corpus_rows import CorpusRows
from data.lengths import Lengths, corpus_lengths, stated_lengths
from extract.batches import cut_lengths, length_batches
from extract.board import Board
from extract.checks import measure_first_rows, padded_batch
from extract.claims import Claims
from extract.reporter import Reporter
from extract.work import ExtractWork
from extract.worker import Tools, make_free_shards
from target.load import Target, load_target
from target.prepare import prepare_target
from target.taps import forward_with_taps

BARE_BAR, NAIVE_BAR = 0.9, 2.0


@dataclass(frozen=True)
class Row:
    side: str
    tokens_per_s: float
    """Of the rows' own tokens, without padding."""
    tokens_per_cpu_s: float
    padding: float
    """Share of computed positions that no row fills."""
    extract_is: float
    """Times this side's tokens/s, median of the rounds' ratios."""
    extract_is_cpu: float
    bar: float | None


class Bench:
    def __init__(
        self,
        config: Config,
        target: Target,
        lengths: Sequence[int],
        naive_batch: int,
        num_shards: int,
    ):
        self.config, self.target, self.naive_batch = config, target, naive_batch
        self.layers = config.drafter.target_layer_ids
        self.num_tokens = sum(lengths)
        self.rows = _rows(lengths, target.vocab_size)
        self.cuts = cut_lengths(lengths, math.ceil(self.num_tokens / num_shards))
        first = measure_first_rows(target, self.rows[:4], self.layers, config.extract.batch_tokens)
        self.tap_rms = first.tap_rms

    def batches(self) -> list[list[CorpusRow]]:
        found = []
        extract = self.config.extract
        for cut in self.cuts:
            rows = self.rows[cut.start : cut.stop]
            lengths = [row.num_tokens for row in rows]
            for batch in length_batches(lengths, extract.batch_tokens, extract.max_padding):
                found.append([rows[index] for index in batch])
        return found

    def naive_batches(self) -> list[list[CorpusRow]]:
        starts = range(0, len(self.rows), self.naive_batch)
        return [self.rows[start : start + self.naive_batch] for start in starts]

    def bare(self, folder: Path) -> None:
        for rows in self.batches():
            input_ids, lengths = padded_batch(rows, self.target.device)
            forward_with_taps(self.target, input_ids, lengths, self.layers, need_last_hidden=False)

    @torch.inference_mode()
    def naive(self, folder: Path) -> None:
        for rows in self.naive_batches():
            input_ids, _ = padded_batch(rows, self.target.device)
            output = self.target.text_model(
                input_ids=input_ids, output_hidden_states=True, use_cache=False
            )
            states = torch.stack([output.hidden_states[i + 1] for i in self.layers], dim=2).cpu()
            for state, row in zip(states, rows, strict=True):
                features = state[: row.num_tokens].contiguous()
                save_file({"features": features}, folder / f"{row.sample_id}.safetensors")

    def extract(self, folder: Path) -> None:
        manifest = write_corpus(folder / "corpus", self.rows, {}, {}, len(self.rows))
        corpus = CorpusRows(folder / "corpus", manifest)
        work = ExtractWork(folder / "corpus", LocalStorage(folder / "features"), manifest, {})
        with Claims(work.storage, self.config.extract.lease_s) as claims:
            board = Board(work, claims, self.cuts)
            reporter = Reporter(work, self.cuts)
            make_free_shards(
                Tools(self.config, work, claims, board, corpus, self.target, self.tap_rms, reporter)
            )
        assert board.is_all_done

    def seconds(self, side: Callable[[Path], None]) -> tuple[float, float]:
        """Wall and processor time of one round, in a folder of its own."""
        with tempfile.TemporaryDirectory() as folder:
            wall, cpu = time.perf_counter(), time.process_time()
            side(Path(folder))
            if self.target.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - wall, time.process_time() - cpu


def measure(bench: Bench, num_rounds: int) -> list[Row]:
    sides = {"bare": bench.bare, "extract": bench.extract, "naive": bench.naive}
    for rows in (bench.batches()[0], bench.naive_batches()[0]):  # warm: kernels and allocator
        input_ids, row_lengths = padded_batch(rows, bench.target.device)
        forward_with_taps(bench.target, input_ids, row_lengths, bench.layers, False)
    rounds = [
        {name: bench.seconds(side) for name, side in sides.items()} for _ in range(num_rounds)
    ]
    batches = {"naive": bench.naive_batches()}
    return [
        Row(
            side=name,
            tokens_per_s=round(statistics.median(bench.num_tokens / r[name][0] for r in rounds), 1),
            tokens_per_cpu_s=round(
                statistics.median(bench.num_tokens / r[name][1] for r in rounds), 1
            ),
            padding=round(_padding(batches.get(name, bench.batches())), 4),
            extract_is=round(statistics.median(r[name][0] / r["extract"][0] for r in rounds), 3),
            extract_is_cpu=round(
                statistics.median(r[name][1] / r["extract"][1] for r in rounds), 3
            ),
            bar={"bare": BARE_BAR, "naive": NAIVE_BAR}.get(name),
        )
        for name in sides
    ]


def _padding(batches: Sequence[Sequence[CorpusRow]]) -> float:
    padded = sum(len(rows) * max(row.num_tokens for row in rows) for rows in batches)
    return 1 - sum(row.num_tokens for rows in batches for row in rows) / padded


def _rows(lengths: Sequence[int], vocab_size: int) -> list[CorpusRow]:
    generator = np.random.default_rng(0)
    return [
        CorpusRow(
            f"row-{index:06d}",
            "bench",
            "bench",
            "train",
            "[]",
            generator.integers(0, vocab_size, num_tokens).astype(np.int32),
            np.arange(num_tokens) >= num_tokens // 3,
            True,
        )
        for index, num_tokens in enumerate(lengths)
    ]


def drawn_lengths(lengths: Lengths, num_tokens: int, shrink: float) -> list[int]:
    """Rows of about `num_tokens` together, drawn from the distribution with a fixed seed, each `shrink` times as short."""
    share = lengths.samples / lengths.samples.sum()
    at_most = 10 + round(2 * num_tokens * shrink / lengths.mean)
    drawn = np.random.default_rng(0).choice(lengths.tokens, size=at_most, p=share) / shrink
    rows = np.maximum(2, drawn.round()).astype(int)
    return rows[: int(np.searchsorted(np.cumsum(rows), num_tokens)) + 1].tolist()


def _lengths_of(source: Path) -> Lengths:
    if source.is_dir():
        return corpus_lengths(source, read_corpus_manifest(source))
    stated = stated_lengths(load_config(source, []).data)
    if stated is None:
        raise ValueError(
            f"--lengths {source} states no lengths; name a recipe with data.num_samples or a corpus folder"
        )
    return stated


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/smollm2.yaml"))
    parser.add_argument("overrides", nargs="*", help="section.key=value of the recipe")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=Path, default=Path("configs/qwen3.6-27b.yaml"))
    parser.add_argument("--shrink", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--shards", type=int, default=4, help="the rows are cut into about so many")
    parser.add_argument("--naive-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/extract.json"))
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = load_config(options.config, options.overrides)
    prepare_target(config)
    lengths = _lengths_of(options.lengths)
    drawn = drawn_lengths(lengths, options.tokens, options.shrink)
    target = load_target(config.target, options.device)
    bench = Bench(config, target, drawn, options.naive_batch, options.shards)
    rows = measure(bench, options.rounds)
    result = {
        "name": "extract",
        "machine": machine(target.device),
        "target": config.target.model,
        "codec": config.extract.codec,
        "batch_tokens": config.extract.batch_tokens,
        "max_padding": config.extract.max_padding,
        "lengths": f"{options.lengths} ({lengths.basis}), divided by {options.shrink:g}",
        "num_rows": len(drawn),
        "num_tokens": sum(drawn),
        "num_shards": len(bench.cuts),
        "naive_batch": options.naive_batch,
        "meets_bars": all(row.bar is None or row.extract_is >= row.bar for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, result)
    _print(result)
    print(f"written to {options.output}")


def _print(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, list)
    for key, value in result.items():
        if key != "rows":
            print(f"{key}: {value}")
    names = list(rows[0])
    print("  ".join(f"{name:>16}" for name in names))
    for row in rows:
        print("  ".join(f"{'' if row[name] is None else row[name]!s:>16}" for name in names))


if __name__ == "__main__":
    main()
