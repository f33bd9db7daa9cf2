"""What bench/gpu_check.sh found, in one JSON and one table: how each part ended, the tests' counts, the benches' results.

    python -m bench.gpu_summary PARTS_FOLDER OUTPUT [--dry]

Exit code 1 if a part failed, ran out of time, left no result, or if a test was skipped or none ran: a check that saw nothing
must not look like one that saw no fault.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from common.files import read_json, write_json

TESTS = "tests"
_TIMED_OUT = (124, 137)
_LOG_LINES = 40


@dataclass(frozen=True)
class Part:
    name: str
    exit_code: int
    limit_s: float
    seconds: float

    def problem(self, folder: Path, tests: Mapping[str, int]) -> str | None:
        """Why this part is no pass, or None."""
        if self.exit_code in _TIMED_OUT and self.seconds >= self.limit_s:
            return f"ran out of its {self.limit_s:g} s"
        if self.exit_code:
            return f"exit code {self.exit_code}"
        if self.name == TESTS:
            return _tests_problem(tests)
        return None if (folder / f"{self.name}.json").is_file() else "left no result"


def summarise(folder: Path, is_dry: bool) -> dict[str, Any]:
    """Everything under `folder`, as one value. Raises FileNotFoundError if no part ran."""
    listing = folder / "parts.tsv"
    if not listing.is_file():
        raise FileNotFoundError(f"{listing} is missing; run bench/gpu_check.sh, which writes it")
    tests = count_tests(folder / "tests.xml")
    parts = [_part(line) for line in listing.read_text().splitlines()]
    problems = {part.name: part.problem(folder, tests) for part in parts}
    return {
        "name": "gpu_check",
        "machine": _machine(),
        "dry": is_dry,
        "passed": not any(problems.values()),
        "seconds": round(sum(part.seconds for part in parts), 1),
        "tests": tests,
        "parts": [asdict(part) | {"problem": problems[part.name]} for part in parts],
        "results": {
            part.name: read_json(folder / f"{part.name}.json", "run bench/gpu_check.sh again")
            for part in parts
            if (folder / f"{part.name}.json").is_file()
        },
        "logs": {name: _log(folder, name) for name, problem in problems.items() if problem},
    }


def count_tests(report: Path) -> dict[str, int]:
    """{tests, failures, errors, skipped} of a JUnit file; zeros if there is none."""
    names = ("tests", "failures", "errors", "skipped")
    if not report.is_file():
        return dict.fromkeys(names, 0)
    suites = list(ElementTree.parse(report).iter("testsuite"))
    return {name: sum(int(suite.get(name, "0")) for suite in suites) for name in names}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The table."""
    tests = result["tests"]
    found = [
        f"{result['name']} on {result['machine']}{' (dry: CPU, toy sizes)' if result['dry'] else ''}",
        f"tests: {tests['tests']} run, {tests['failures']} failed, {tests['errors']} errors, {tests['skipped']} skipped",
        f"{'part':<12}{'seconds':>9}  outcome",
    ]
    for part in result["parts"]:
        found.append(f"{part['name']:<12}{part['seconds']:>9}  {part['problem'] or 'passed'}")
    return [*found, f"{'total':<12}{result['seconds']:>9}"]


def _part(line: str) -> Part:
    name, exit_code, limit, seconds = line.split("\t")
    return Part(name, int(exit_code), float(limit), float(seconds))


def _tests_problem(tests: Mapping[str, int]) -> str | None:
    if tests["tests"] == 0:
        return "no test ran"
    return f"{tests['skipped']} tests were skipped" if tests["skipped"] else None


def _log(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]


def _machine() -> str:
    has_gpu = torch.cuda.is_available()
    chip = torch.cuda.get_device_name(0) if has_gpu else platform.machine()
    return f"{chip}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", type=Path, help="folder that bench/gpu_check.sh wrote")
    parser.add_argument("output", type=Path)
    parser.add_argument("--dry", action="store_true", help="made on the CPU at toy sizes")
    options = parser.parse_args()
    result = summarise(options.parts, options.dry)
    write_json(options.output, result)
    print("\n".join(lines(result)))
    print(f"written to {options.output}")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
