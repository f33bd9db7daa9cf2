"""The GPU check tells a fault from a pass, above all the kinds of nothing that look like a pass."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.gpu_summary import count_tests, lines, summarise

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_check.sh"


def parts_folder(
    folder: Path, ends: dict[str, tuple[int, float]], junit: str | None, results: tuple[str, ...]
) -> Path:
    """What the script leaves: parts.tsv of name -> (exit code, seconds), limits of 60 s, logs, results."""
    rows = [f"{name}\t{rc}\t60\t{seconds}\n" for name, (rc, seconds) in ends.items()]
    (folder / "parts.tsv").write_text("".join(rows))
    for name in ends:
        (folder / f"{name}.log").write_text(f"last words of {name}\n")
    for name in results:
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "rows": []}))
    if junit is not None:
        (folder / "tests.xml").write_text(junit)
    return folder


def junit(tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> str:
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    return f'<testsuites><testsuite name="pytest" {counts}></testsuite></testsuites>'


def test_a_check_in_which_all_ran_passes(tmp_path: Path) -> None:
    ends = {"tests": (0, 9.5), "verify": (0, 20.0)}
    result = summarise(parts_folder(tmp_path, ends, junit(27), ("verify",)), is_dry=False)
    assert result["passed"]
    assert (result["seconds"], result["logs"], result["tests"]["tests"]) == (29.5, {}, 27)
    assert result["results"] == {"verify": {"name": "verify", "rows": []}}
    assert [part["problem"] for part in result["parts"]] == [None, None]


@pytest.mark.parametrize(
    ("ends", "report", "results", "part", "problem"),
    [
        ((0, 5.0), junit(27, skipped=2), ("verify",), "tests", "2 tests were skipped"),
        ((0, 5.0), junit(0), ("verify",), "tests", "no test ran"),
        ((0, 5.0), None, ("verify",), "tests", "no test ran"),
        ((5, 5.0), junit(0), ("verify",), "tests", "exit code 5"),
        ((0, 5.0), junit(27), (), "verify", "left no result"),
        ((124, 60.1), junit(27), ("verify",), "tests", "ran out of its 60 s"),
        ((137, 65.0), junit(27), ("verify",), "tests", "ran out of its 60 s"),
    ],
)
def test_what_is_no_pass_fails_and_says_why(
    tmp_path: Path,
    ends: tuple[int, float],
    report: str | None,
    results: tuple[str, ...],
    part: str,
    problem: str,
) -> None:
    folder = parts_folder(tmp_path, {"tests": ends, "verify": (0, 1.0)}, report, results)
    result = summarise(folder, is_dry=False)
    assert not result["passed"]
    assert result["logs"] == {part: [f"last words of {part}"]}
    assert any(part in line and problem in line for line in lines(result))


def test_counts_add_up_over_suites(tmp_path: Path) -> None:
    file = tmp_path / "tests.xml"
    suites = junit(3, 1).removeprefix("<testsuites>").removesuffix("</testsuites>")
    file.write_text(f"<testsuites>{suites}{suites}</testsuites>")
    assert count_tests(file) == {"tests": 6, "failures": 2, "errors": 0, "skipped": 0}


def test_no_check_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"parts.tsv is missing; run bench/gpu_check.sh"):
        summarise(tmp_path, is_dry=False)


def test_an_unknown_argument_runs_nothing() -> None:
    done = subprocess.run([SCRIPT, "--cpu"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown argument '--cpu'" in done.stderr


def test_the_parts_of_a_gpu_run_fit_into_five_minutes() -> None:
    """Every limit of the CUDA half, added up: no part can make the whole longer."""
    gpu_half = SCRIPT.read_text().rpartition("else\n")[2].partition("\nfi")[0]
    limits = []
    for line in gpu_half.splitlines():
        words = line.split()
        limits.append(int(words[2] if words[0] == "part" else words[3]))
    assert len(limits) == 5
    assert sum(limits) <= 300


@pytest.mark.slow
def test_the_dry_check_passes_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, "--dry"],
        env={"PATH": "/usr/bin:/bin", "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    assert result["passed"]
    assert set(result["results"]) == {"build", "verify", "decode", "mission"}
    assert result["tests"]["tests"] > 10
