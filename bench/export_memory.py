"""How much memory an export takes: writing and verifying, in copies of the drafter as trained (float32).

    python -m bench.export_memory [--megabytes 256] [--output outputs/bench/export_memory.json]

A random drafter of the asked size is written as a checkpoint, with two rows of features and a small target. Each case runs in a
process of its own, which samples its anonymous memory (what cannot be given back to the page cache) every few milliseconds;
the peak above what it held before is divided by the checkpoint's bytes. Beside each case stands the plain way: whole state
dicts, and all drafters of the comparison at once. Some ten seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.files import sha256_file, write_json
from data.feature_manifest import FeatureManifest, HeadEntry, ShardEntry
from data.feature_shards import FeatureLayout, FeatureRow, write_shard
from drafter.config import FULL, DrafterConfig
from drafter.folder import load_drafter, write_drafter
from drafter.weights import WEIGHTS_FILE, expected_shapes
from export.folder import Output, write_folder
from export.stage import write_checkpoint
from export.verify import VerifyJob, verify_export

HIDDEN, VOCABULARY, TAPS, TOKENS = 1024, 512, (1, 2, 3), 32
CASES = ("write", "write, whole state dicts", "verify", "verify, three drafters at once")


@dataclass(frozen=True)
class Row:
    case: str
    drafter_mb: float
    """The float32 checkpoint's weights."""
    peak_mb: float
    """Anonymous memory at its peak, above what the process held before."""
    copies: float
    """peak_mb / drafter_mb."""


def drafter_of(megabytes: int) -> DrafterConfig:
    """Layers of 1024 with as many as fit the size."""
    config = DrafterConfig(
        hidden_size=HIDDEN,
        num_layers=1,
        intermediate_size=3 * HIDDEN,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=VOCABULARY,
        block_size=8,
        mask_token_id=0,
        target_layer_ids=TAPS,
        layer_types=(FULL,),
        sliding_window=None,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        num_target_layers=6,
    )
    layer_bytes = 4 * sum(
        torch.Size(shape).numel()
        for name, shape in expected_shapes(config).items()
        if name.startswith("layers.")
    )
    layers = max(1, round(megabytes * 1e6 / layer_bytes))
    return DrafterConfig(**asdict(config) | {"num_layers": layers, "layer_types": (FULL,) * layers})


def make_run(folder: Path, megabytes: int) -> None:
    """checkpoint/, features/ and target/ below `folder`."""
    config, generator = drafter_of(megabytes), torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(shape, generator=generator) * 0.02
        for name, shape in expected_shapes(config).items()
    }
    write_drafter(folder / "checkpoint", config, state, torch.float32)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    target, features = folder / "target", folder / "features"
    for path in (target, features):
        path.mkdir()
    facts = {"num_hidden_layers": 6, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    write_json(target / "config.json", facts | {"tie_word_embeddings": True})
    save_file({"model.embed_tokens.weight": embedding}, target / "model.safetensors")
    save_file({"embed_tokens.weight": embedding}, features / "target_head.safetensors")
    row = FeatureRow(
        sample_id="0",
        source="bench",
        task="bench",
        split="train",
        input_ids=torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        loss_mask=torch.arange(TOKENS) >= 4,
        features=torch.randn(TOKENS, len(TAPS), HIDDEN, generator=generator),
    )
    shard = features / "shard-000000.parquet"
    write_shard(shard, [row], FeatureLayout("fp32", len(TAPS), HIDDEN))
    entry = {key: vars(row)[key] for key in ("sample_id", "source", "task", "split")}
    entry |= {"num_tokens": TOKENS, "num_response_tokens": TOKENS - 4}
    settings = {
        "recipe": {},
        "target_layer_ids": list(TAPS),
        "hidden_size": HIDDEN,
        "codec": "fp32",
    }
    size = shard.stat().st_size
    head = features / "target_head.safetensors"
    manifest = FeatureManifest(
        settings,
        [ShardEntry(shard.name, 1, TOKENS, size, sha256_file(shard), [entry])],
        [],
        HeadEntry(head.name, sha256_file(head)),
    )
    write_json(features / "manifest.json", manifest.to_json())
    write_checkpoint(folder / "checkpoint", folder / "export", Output("zlab", None))


def run_case(case: str, folder: Path) -> int:
    """Peak bytes of this process above what it holds when the case starts."""
    checkpoint, out = folder / "checkpoint", folder / f"out-{os.getpid()}"
    job = VerifyJob(folder / "export", checkpoint, folder / "features", folder / "target", 1, 1)
    with _peak() as peak:
        if case == "write":
            write_checkpoint(checkpoint, out, Output("zlab", None))
        elif case == "write, whole state dicts":
            drafter = load_drafter(checkpoint, "cpu", torch.float32)
            state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
            write_folder(
                out, drafter.config, state.__getitem__, torch.bfloat16, Output("zlab", None)
            )
        elif case == "verify":
            verify_export(job)
        else:
            kept = [load_drafter(checkpoint, "cpu", torch.bfloat16).float()]
            kept.append(load_drafter(job.export, "cpu", torch.float32))
            verify_export(job)
            del kept
    return peak[0]


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """One number, in bytes, once the block has ended."""
    result, done = [0], threading.Event()
    before = anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.002):
            result[0] = max(result[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield result
    done.set()
    watcher.join()


def anonymous_bytes() -> int:
    """Linux' RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this machine does not say RssAnon; the bench needs Linux")


def measure(case: str, folder: Path) -> Row:
    line = [sys.executable, "-m", "bench.export_memory", "--case", case, "--folder", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    size = (folder / "checkpoint" / WEIGHTS_FILE).stat().st_size
    peak = int(json.loads(done.stdout))
    return Row(case, round(size / 1e6, 1), round(peak / 1e6, 1), round(peak / size, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of an export, in drafters")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/export_memory.json"))
    parser.add_argument("--megabytes", type=int, default=256, help="of the float32 drafter")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.case:
        print(run_case(arguments.case, arguments.folder))
        return
    with tempfile.TemporaryDirectory() as name:
        make_run(Path(name), arguments.megabytes)
        rows = [measure(case, Path(name)) for case in CASES]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    result = {"name": "export_memory", "machine": machine, "rows": [asdict(row) for row in rows]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)
    print(f"{result['name']} on {machine}")
    print(f"{'case':<34}{'drafter MB':>12}{'peak MB':>10}{'copies':>8}")
    for row in rows:
        print(f"{row.case:<34}{row.drafter_mb:>12}{row.peak_mb:>10}{row.copies:>8}")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
