"""Where decoding time goes: wall seconds a stage, the rest of a round included."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

STAGES = ("draft", "build", "verify", "commit", "rest")
"""Of a round, after prefill. draft: the drafter with its head and cache; build: from log-probs to a tree; rest: the target's
choices, the walk and all bookkeeping. Everything but draft and verify is the acceptor's own."""


class StageClock:
    """The device is waited for on both sides of a stage, so that work is charged to whom it belongs."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Seconds of every stage since the last lap, `rest` being what passed outside the named ones."""
        now = time.perf_counter()
        named = {stage: self._seconds.get(stage, 0.0) for stage in STAGES[:-1]}
        rest = max(now - self._start - sum(self._seconds.values()), 0.0)
        self._seconds, self._start = {}, now
        return {**named, "rest": rest}

    def total(self, stage: str) -> float:
        """Seconds of one stage, which may be none of STAGES, since the last lap."""
        return self._seconds[stage]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
