"""Ctrl-C and SIGTERM during training: finish the step, save, leave with the exit code that says which it was."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the two signals are noted instead of obeyed. The same signal again leaves at once."""

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        """on_request: called at the first signal, in the main thread."""
        self._on_request = on_request
        self._received: set[int] = set()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def received(self) -> torch.Tensor:
        """(2,) float64, 1.0 for each of SIGNALS this rank has been sent."""
        return torch.tensor([float(n in self._received) for n in SIGNALS], dtype=torch.float64)

    @property
    def is_asked(self) -> bool:
        """Whether this rank has been sent one."""
        return bool(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._received:
            leave(torch.tensor([float(n == number) for n in SIGNALS]))
        self._received.add(number)
        self._on_request()


def leave(received: torch.Tensor) -> NoReturn:
    """Exit as an interrupted command does: 143 after a SIGTERM, else as Ctrl-C. received: (2,), see StopRequest."""
    if received[SIGNALS.index(signal.SIGTERM)] > 0:
        sys.exit(128 + signal.SIGTERM)
    raise KeyboardInterrupt
