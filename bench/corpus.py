"""Selection at scale: rows a second and peak memory of the whole first half of the data stage, at two sizes.

    python -m bench.corpus [--rows 50000 200000] [--words 10 60] [--output outputs/bench/corpus.json]

Each size runs in a process of its own on synthetic conversations (a fifth doubles, a tenth near-doubles, some test prompts
inside), through reading, template, tokenizer, filters, MinHash, doubles, decontamination, order and plan; only labels are not
made. Peak memory is the process' own, mapped files included. Linear growth: CPU time a row at the
largest size over that at the smallest is near 1, and memory grows by what the table says a row. Minutes at the default sizes
on an idle core; `--rows 5000 20000` is for a quick look.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

from common.files import write_json
from configs.load import load_config
from configs.schema import Config

_WORDS = 40_000
_EXAMS = 200


@dataclass(frozen=True)
class Row:
    num_rows: int
    num_prompts: int
    seconds: float
    cpu_seconds: float
    """Of one core; on a busy machine the steadier of the two."""
    rows_per_s: float
    rows_per_cpu_s: float
    peak_mib: float
    imports_mib: float
    """Of it, before the first row: Python, torch, transformers, the tokenizer."""
    peak_bytes_a_row: float
    dropped: dict[str, int]


def conversations(num_rows: int, words_from: int, words_to: int, seed: int) -> Iterator[str]:
    """Lines of JSON: prompts of so many words with a natural distribution of word frequencies."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array([f"{_syllables(i)}" for i in range(_WORDS)])
    recent: list[list[str]] = []
    for row in range(num_rows):
        kind = rng.random()
        if recent and kind < 0.3:
            words = list(recent[rng.integers(0, len(recent))])
            if kind < 0.1:
                words[rng.integers(0, len(words))] = "changed"
        elif kind < 0.302:
            words = ["please", *exam(int(rng.integers(0, _EXAMS)))]
        else:
            drawn = (
                np.minimum(rng.zipf(1.2, int(rng.integers(words_from, words_to + 1))), _WORDS) - 1
            )
            words = vocabulary[drawn].tolist()
        if row % 10 == 0:
            recent.append(words)
            recent = recent[-2000:]
        text = " ".join(words) + "?"
        yield json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n"


def exam(number: int) -> list[str]:
    return [f"exam{number}", *(f"{_syllables(number * 37 + i)}" for i in range(20))]


def _syllables(number: int) -> str:
    parts = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu"]
    return "".join(parts[int(digit)] for digit in str(number))


def recipe_of(folder: Path, num_rows: int, words: list[int]) -> Path:
    """A run over `num_rows` synthetic rows and 200 test prompts, with the debug target's tokenizer."""
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(conversations(num_rows, *words, seed=0))
    with (folder / "exam.jsonl").open("w") as file:
        for number in range(_EXAMS):
            text = " ".join(exam(number))
            file.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    tree = yaml.safe_load(Path("configs/debug.yaml").read_text())
    tree["run"] = {"name": "bench-corpus", "output_dir": str(folder / "run")}
    tree["data"] = {
        "sources": [
            {"name": "rows", "kind": "jsonl", "path": str(folder / "rows.jsonl")},
            {"name": "exam", "kind": "jsonl", "path": str(folder / "exam.jsonl"), "split": "test"},
        ],
        "near_duplicate_similarity": 0.8,
        "responses": {"max_new_tokens": 48},
        "max_prompt_tokens": 4096,
        "max_tokens": 4160,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


def peak_bytes() -> int:
    """The most memory this process ever held, file pages that it mapped included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(config: Config, num_rows: int) -> Row:
    from data.build import prepare_plan
    from data.plan import read_plan
    from target.load import load_tokenizer
    from target.prepare import prepare_target

    prepare_target(config)
    load_tokenizer(config.target)
    before = peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    folder = config.run.folder / "corpus"
    prepare_plan(config, folder)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    plan, peak = read_plan(folder / "units"), peak_bytes()
    return Row(
        num_rows=num_rows,
        num_prompts=plan.num_prompts,
        seconds=round(seconds, 2),
        cpu_seconds=round(cpu_seconds, 2),
        rows_per_s=round(num_rows / seconds, 1),
        rows_per_cpu_s=round(num_rows / cpu_seconds, 1),
        peak_mib=round(peak / 2**20, 1),
        imports_mib=round(before / 2**20, 1),
        peak_bytes_a_row=round((peak - before) / num_rows, 1),
        dropped=dict(sorted(plan.counts["rows"].rejected.items())),
    )


def measured_apart(num_rows: int, words: list[int]) -> Row:
    """In a process of its own, so that one size's memory is not another's."""
    with tempfile.TemporaryDirectory(prefix="bench-corpus-") as folder:
        recipe = recipe_of(Path(folder), num_rows, words)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bench.corpus",
                "--measure",
                str(recipe),
                "--rows",
                str(num_rows),
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        return Row(**json.loads(done.stdout))


def table(rows: list[Row]) -> str:
    head = f"{'rows':>9}{'prompts':>9}{'seconds':>9}{'CPU s':>8}{'rows/s':>8}{'rows/CPU s':>12}{'peak MiB':>10}{'imports':>9}{'bytes/row':>11}"
    lines = [
        f"{r.num_rows:>9,}{r.num_prompts:>9,}{r.seconds:>9.1f}{r.cpu_seconds:>8.1f}{r.rows_per_s:>8,.0f}{r.rows_per_cpu_s:>12,.0f}{r.peak_mib:>10.0f}"
        f"{r.imports_mib:>9.0f}{r.peak_bytes_a_row:>11.0f}"
        for r in rows
    ]
    first, last = rows[0], rows[-1]
    growth = (last.cpu_seconds / last.num_rows) / (first.cpu_seconds / first.num_rows)
    more = (last.peak_mib - first.peak_mib) * 2**20 / max(last.num_rows - first.num_rows, 1)
    return "\n".join(
        [
            head,
            *lines,
            f"CPU time a row, {last.num_rows:,} over {first.num_rows:,} rows: {growth:.2f} (1: linear)",
            f"memory a further row: {more:.0f} bytes; at a million rows {last.peak_mib + more * (10**6 - last.num_rows) / 2**20:,.0f} MiB",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.corpus", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 200_000])
    parser.add_argument(
        "--words", type=int, nargs=2, default=[10, 60], metavar=("FROM", "TO"), help="of a prompt"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/corpus.json"))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure(load_config(options.measure), options.rows[0]))))
        return
    rows: list[Row] = []
    for num_rows in options.rows:
        print(f"{num_rows:,} rows ...", file=sys.stderr)
        rows.append(measured_apart(num_rows, options.words))
        print(f"  {rows[-1]}", file=sys.stderr)
    print(table(rows))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    write_json(
        options.output, {"name": "corpus", "machine": machine, "rows": [asdict(r) for r in rows]}
    )


if __name__ == "__main__":
    main()
