"""How much memory and time the target's forward takes, from its size and the recipe. Estimates, loads no model and no torch.

T tokens of a padded batch (extract.batch_tokens), D taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.files import fields_of
from configs.schema import Config, TargetSection

ASSUMED_FLOPS = 0.4 * 989e12
"""A second of prefill on one H100 or H200: 40 % of its dense bf16 peak."""
ASSUMED_GPU = "40 % of an H100's 989 TFLOP/s"
FILLS_A_GPU = 1e9  # parameters; below, a forward waits for other things than arithmetic
MLP_WIDTH = 3.5  # intermediate over hidden size, where no config.json says it
HEAD_CHUNK_ROWS = 256  # rows of logits alive at once (extract/checks.py, extract/soft_labels.py)
GPU_GB = (16, 24, 40, 48, 80, 96, 141, 180)
RESERVE = 1.1  # the allocator's fragments and the CUDA context


@dataclass(frozen=True)
class TargetSize:
    num_parameters: int
    mlp_width: int
    is_tied: bool
    """Embedding and head are one matrix."""
    basis: str


@dataclass(frozen=True)
class Footprint:
    """Of one rank while it extracts, in bytes."""

    weights: float
    taps: float
    """The D outputs that are kept, and the stacked copy."""
    layer: float
    """What one layer holds while it works: residual, projections, MLP."""
    head: float
    """Logits of the first rows' check, and of soft labels."""
    host: float
    """Host memory: shards being filled, encoded and written."""
    tokens_per_s: float | None
    """One GPU, at ASSUMED_FLOPS: for plans made before anything was measured; None for a target too small to fill one."""
    basis: str

    @property
    def device(self) -> float:
        return self.weights + self.taps + self.layer + self.head

    @property
    def gpu_gb(self) -> int | None:
        """The smallest usual GPU that holds it; None: it takes several."""
        needed = self.device * RESERVE / 1e9
        return next((size for size in GPU_GB if size >= needed), None)

    def num_gpus(self, gpu_gb: int = 80) -> int:
        """GPUs of that size that hold the weights together and one batch each."""
        room = gpu_gb * 1e9 / RESERVE - (self.device - self.weights)
        return max(1, math.ceil(self.weights / room)) if room > 0 else 0


def target_size(section: TargetSection) -> TargetSize | None:
    """Counted in the target's local folder, else as the recipe states it; None if neither knows."""
    folder = Path(section.model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if files:
        shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
        count = sum(math.prod(shape) for shape in shapes.values())
        is_tied = not any(name.endswith("lm_head.weight") for name in shapes)
        return TargetSize(count, _mlp_width(section, folder), is_tied, f"counted in {folder}")
    if section.num_parameters is None:
        return None
    width = round(MLP_WIDTH * section.hidden_size)
    return TargetSize(section.num_parameters, width, False, "target.num_parameters")


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Shapes by name from a safetensors header. Raises ValueError if it has none."""
    remedy = "fetch the target again"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is cut short; {remedy}")
        header = json.loads(file.read(length))
    with fields_of(path, remedy):
        return {name: value["shape"] for name, value in header.items() if name != "__metadata__"}


def footprint(config: Config, raw_shard_bytes: float) -> Footprint | None:
    """None if nobody knows the target's size. raw_shard_bytes: what one shard holds in memory."""
    size = target_size(config.target)
    if size is None:
        return None
    target, extract = config.target, config.extract
    value = 2 if target.dtype == "bfloat16" else 4
    taps, hidden = len(config.drafter.target_layer_ids), target.hidden_size
    tokens = max(extract.batch_tokens, config.data.max_tokens)  # a longer row is a batch of its own
    soft = tokens * hidden * value if extract.soft_labels else 0
    return Footprint(
        weights=size.num_parameters * value,
        taps=2 * tokens * taps * hidden * value,
        layer=tokens * (6 * hidden + 3 * size.mlp_width) * value,
        head=HEAD_CHUNK_ROWS * target.vocab_size * (value + 8) + soft,
        host=(extract.writers + 2) * 2 * raw_shard_bytes,
        tokens_per_s=ASSUMED_FLOPS / flops_per_token(config, size)
        if size.num_parameters >= FILLS_A_GPU
        else None,
        basis=size.basis,
    )


def flops_per_token(config: Config, size: TargetSize) -> float:
    """Two a weight of the layers that run: all up to the last tap, with soft labels the rest and the head too.

    Attention over the context is left out: a few percent at 2,000 tokens.
    """
    target = config.target
    end = target.vocab_size * target.hidden_size
    layers = size.num_parameters - end * (1 if size.is_tied else 2)
    if config.extract.soft_labels:
        return 2.0 * (layers + end)
    return 2.0 * layers * (max(config.drafter.target_layer_ids) + 1) / target.num_layers


def _mlp_width(section: TargetSection, folder: Path) -> int:
    config = folder / "config.json"
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    values = values.get("text_config", values)
    return values.get("intermediate_size", round(MLP_WIDTH * section.hidden_size))
