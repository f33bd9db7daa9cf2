"""Speed of a training run: what happened since its last line, without what the clock was paused for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from configs.schema import TrainSection
from train.flops import peak_tflops


def device_peak_tflops(train: TrainSection, device: torch.device) -> float | None:
    """What MFU compares with: the recipe's number, or a known GPU's in bfloat16; None on a CPU."""
    if train.peak_tflops is not None:
        return train.peak_tflops
    if device.type != "cuda" or train.dtype != "bfloat16":
        return None
    return peak_tflops(torch.cuda.get_device_name(device))


class Clock:
    """Seconds, those of them waited for batches, steps, tokens, blocks and operations since the last line, without evaluations
    and checkpoints."""

    def __init__(self, num_devices: int, peak_tflops: float | None) -> None:
        self.num_devices, self.peak_tflops = num_devices, peak_tflops
        self.reset()

    def reset(self) -> None:
        self.steps, self.tokens, self.blocks, self.flops = 0, 0.0, 0.0, 0.0
        self.waited_s, self.walked_s = 0.0, 0.0
        self.start = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.start += time.monotonic() - begin

    @contextlib.contextmanager
    def walking(self) -> Iterator[None]:
        """Paused, to find where passes start (train/walks.py)."""
        begin = time.monotonic()
        with self.paused():
            yield
        self.walked_s += time.monotonic() - begin

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.waited_s += time.monotonic() - begin

    def lap(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.start, 1e-9)
        tflops = self.flops / elapsed / self.num_devices / 1e12
        metrics = {
            "train/tokens_per_s": self.tokens / elapsed,
            "train/anchors_per_s": self.blocks / elapsed,
            "train/step_s": elapsed / max(1, self.steps),
            "train/wait_s": self.waited_s / max(1, self.steps),
            "speed/tflops_per_s": tflops,
        }
        if self.peak_tflops is not None:
            metrics["speed/mfu"] = tflops / self.peak_tflops
        self.reset()
        return metrics
