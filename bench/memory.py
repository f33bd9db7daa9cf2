"""The resident memory a call takes at its peak, for benches: what the process holds, whoever allocates it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_above_bytes(run: Callable[[], object]) -> int:
    """Peak of resident bytes while `run` runs, above what was resident before. Linux only.

    Run what it would only load or set up once before: it is not told apart.
    """
    CLEAR.write_text("5")  # resets the high-water mark
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])
