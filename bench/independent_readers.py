"""A run's drafter in the released packages of others: the same logits, and the same tokens accepted in the same passes?

    python -m bench.independent_readers configs/demo.yaml [--prompts 3] [--tokens 32] [section.key=value ...]

Exports the run's checkpoint in both formats into a temporary folder and reads them with z-lab's dflash 0.1.0 and speculators
0.9.0: logits of recorded blocks (float32, largest difference over the largest logit), and greedy chain decoding of held-out
prompts against this project's own. Exit code 1 if anything differs. About two minutes for the demo.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.readers import (
    load_speculators,
    load_zlab,
    speculators_decode,
    speculators_logits,
    zlab_decode,
    zlab_logits,
)
from common.files import write_json
from configs.load import load_config
from configs.schema import Config
from data.feature_shards import FeatureRow
from data.features import FeatureSet, open_features
from ddtree.verify import TreeVerifier
from drafter.folder import Format, load_drafter, resolve_checkpoint
from drafter.masks import BlockLayout
from drafter.model import Drafter, block_embeddings
from evaluation.acceptors import CHAIN
from evaluation.decode import decode_with_tree
from evaluation.decoded import DecodeSettings
from export.folder import Output
from export.stage import write_checkpoint
from export.target_files import verifier_of
from export.verify import find_anchors
from target.generate import Sampling
from target.head import TargetHead
from target.load import Target, load_target, target_folder

TOLERANCE, ROWS, ANCHORS = 1e-5, 3, 6


@dataclass(frozen=True)
class Row:
    reader: str
    num_blocks: int
    logit_difference: float
    """Largest difference over the largest logit."""
    num_prompts: int
    num_passes: int
    num_tokens: int
    num_equal: int
    """Prompts with the same tokens, emitted in the same passes."""
    tokens_a_pass: float


def compare(config: Config, num_prompts: int, num_tokens: int) -> list[Row]:
    target = load_target(config.target, "cpu", dtype="float32", attention="sdpa")
    checkpoint = resolve_checkpoint(config.run.folder / "checkpoints", config.export.checkpoint)
    features = open_features(config.run.folder / "features")
    with tempfile.TemporaryDirectory() as name:
        folders = {form: Path(name) / form for form in ("zlab", "speculators")}
        source = target_folder(config.target)
        verifier = verifier_of(str(source.resolve()), source)
        for form, folder in folders.items():
            write_checkpoint(checkpoint, folder, Output(_format(form), verifier))
        ours = load_drafter(folders["zlab"], "cpu", torch.float32).eval()
        zlab, theirs = load_zlab(folders["zlab"]), load_speculators(folders["speculators"])
    head = TargetHead(target.embed_tokens, target.lm_head)
    prompts = [_prompt(row) for row in _rows(features, "test", num_prompts)]
    wanted = [_decode(config, target, ours, head, prompt, num_tokens) for prompt in prompts]
    rows = _rows(features, "train", ROWS)
    logits = {
        f"dflash {version('dflash')}": lambda row, at: zlab_logits(
            zlab, target, row.input_ids, row.features, at
        ),
        f"speculators {version('speculators')}": lambda row, at: speculators_logits(
            theirs, row.input_ids, row.features, at
        ),
    }
    decoders = (zlab_decode, zlab), (speculators_decode, theirs)
    return [
        Row(
            name,
            *_differences(ours, head, rows, find),
            **_agreement([decode(model, target, p, num_tokens) for p in prompts], wanted),
        )
        for (name, find), (decode, model) in zip(logits.items(), decoders, strict=True)
    ]


def _format(name: str) -> Format:
    return "zlab" if name == "zlab" else "speculators"


def _rows(features: FeatureSet, split: str, most: int) -> list[FeatureRow]:
    return [features.read(entry) for entry in features.of_split(split)[:most]]


def _prompt(row: FeatureRow) -> Tensor:
    return row.input_ids[: int(row.loss_mask.int().argmax())]


def _decode(
    config: Config, target: Target, drafter: Drafter, head: TargetHead, prompt: Tensor, length: int
) -> tuple[list[int], list[int]]:
    settings = DecodeSettings(length, target.eos_token_ids, Sampling())
    verifier = TreeVerifier(target, config.drafter.target_layer_ids)
    done = decode_with_tree(verifier, drafter, head, prompt, CHAIN, settings)
    return done.tokens, done.passes


@torch.no_grad()
def _differences(
    drafter: Drafter, head: TargetHead, rows: list[FeatureRow], find: Any
) -> tuple[int, float]:
    """Number of blocks, and the largest difference of their logits over the largest logit."""
    largest, difference, blocks = 0.0, 0.0, 0
    for row in rows:
        places = torch.arange(len(row.input_ids))[None]
        room = find_anchors(row.loss_mask, ANCHORS)
        where = room[None]
        embeddings = block_embeddings(
            head.embedding,
            row.input_ids[where],
            drafter.config.mask_token_id,
            drafter.config.block_size,
        )
        layout = BlockLayout(places, places * 0, where, where * 0)
        wanted = drafter(row.features[None].float(), embeddings, layout)[0, :, 1:] @ head.head.T
        found = find(row, room.tolist())
        largest = max(largest, float(wanted.abs().max()))
        difference = max(difference, float((found - wanted).abs().max()))
        blocks += len(room)
    return blocks, difference / largest


def _agreement(
    found: list[tuple[list[int], list[int]]], wanted: list[tuple[list[int], list[int]]]
) -> dict[str, Any]:
    passes = [emitted for _, emitted_a_pass in wanted for emitted in emitted_a_pass]
    return {
        "num_prompts": len(wanted),
        "num_passes": len(passes),
        "num_tokens": sum(passes),
        "num_equal": sum(a == b for a, b in zip(found, wanted, strict=True)),
        "tokens_a_pass": round(sum(passes) / len(passes), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="A run's drafter in the packages of others")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--prompts", type=int, default=3, help="held-out prompts to decode")
    parser.add_argument("--tokens", type=int, default=32, help="of each response, at most")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/bench/independent_readers.json")
    )
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    config = load_config(arguments.config, arguments.overrides)
    rows = compare(config, arguments.prompts, arguments.tokens)
    machine = (
        f"{platform.machine()}, torch {torch.__version__}, transformers {version('transformers')}"
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"name": "independent_readers", "machine": machine, "rows": [asdict(r) for r in rows]}
    write_json(arguments.output, result)
    print(f"independent_readers of {config.run.name} on {machine}")
    print(
        f"{'reader':<20}{'blocks':>7}{'logits differ':>15}{'prompts equal':>15}{'passes':>8}{'tokens':>8}"
    )
    for row in rows:
        equal = f"{row.num_equal} of {row.num_prompts}"
        print(
            f"{row.reader:<20}{row.num_blocks:>7}{row.logit_difference:>15.1e}{equal:>15}"
            f"{row.num_passes:>8}{row.num_tokens:>8}"
        )
    print(f"written to {arguments.output}")
    good = all(r.logit_difference <= TOLERANCE and r.num_equal == r.num_prompts for r in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
