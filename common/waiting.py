"""Waiting for another process: pauses that grow, and now and then a line that says for what."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from common.progress import format_duration

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
FIRST_LINE_S, LINE_EVERY_S = 5.0, 60.0


class Waiting:
    """One wait: `pause` as often as it takes. Not polling hard: 2 s after some tries, so 0.5 small requests a second."""

    def __init__(self, closed: threading.Event | None = None):
        """closed: ends a pause at once."""
        self._closed = closed or threading.Event()
        self._pause_s, self._next_line_s = FIRST_PAUSE_S, FIRST_LINE_S
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def pause(self, what: Callable[[], str]) -> None:
        """`what`: the line, asked for when one is due."""
        if self.elapsed_s >= self._next_line_s:
            self._next_line_s = self.elapsed_s + LINE_EVERY_S
            logger.info("%s (waited %s)", what(), format_duration(self.elapsed_s))
        self._closed.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
