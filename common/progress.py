"""One line of progress at a time, with rate and ETA, for every step over ten seconds."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("progress")


class Progress:
    """Logs `what: done/total unit, rate/s, ETA` at most every `every_s` seconds, and once at the end."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0, every_s: float = 5.0):
        self.what, self.total, self.unit, self.every_s = what, total, unit, every_s
        self.done = self.first = done
        self.start = self.last = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.last >= self.every_s and self.done < self.total:
            self.last = now
            self._log(now, note)

    def finish(self, note: str = "") -> None:
        self._log(time.monotonic(), note)

    def _log(self, now: float, note: str) -> None:
        elapsed = max(now - self.start, 1e-9)
        rate = (self.done - self.first) / elapsed
        left = (
            f"ETA {format_duration((self.total - self.done) / rate)}" if rate > 0 else "ETA unknown"
        )
        if self.done >= self.total:
            left = f"took {format_duration(elapsed)}"
        tail = f", {note}" if note else ""
        logger.info(
            "%s: %d/%d %s, %.1f/s, %s%s",
            self.what,
            self.done,
            self.total,
            self.unit,
            rate,
            left,
            tail,
        )


def format_duration(seconds: float) -> str:
    """`42s`, `3m05s`, `7h02m`, `12d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
