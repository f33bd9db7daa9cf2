"""An export holds about one copy of the drafter at a time, in writing and in verifying."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.export_memory import make_run, measure

pytestmark = pytest.mark.slow


def test_about_one_copy_of_the_drafter_is_alive(tmp_path: Path) -> None:
    make_run(tmp_path, megabytes=600)  # large beside what libraries allocate at first use
    assert measure("write", tmp_path).copies < 0.7
    assert measure("verify", tmp_path).copies < 1.4
    assert measure("verify, three drafters at once", tmp_path).copies > 2, "the meter sees copies"
