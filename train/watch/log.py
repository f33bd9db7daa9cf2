"""A run's training log as curves. Logs of older versions have fewer metrics; a line that is being written is left out."""

from __future__ import annotations

import datetime
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.files import fields_of, read_json, write_json
from common.step_log import read_step_log
from configs.schema import Config

Points = list[tuple[float, float]]
REMEDY = "delete it; the next start of training writes it again"


@dataclass(frozen=True)
class RunLog:
    """One run: its log's lines, and its settings where they were written down."""

    name: str
    path: Path
    """Of train.jsonl."""
    lines: list[dict[str, float]]
    settings: Mapping[str, Any]
    """`train.loss`: value, of the recipe; empty for a run older than logs/run.json."""
    written: datetime.datetime
    """When its last line was, UTC."""

    @functools.cached_property
    def names(self) -> set[str]:
        """Metrics with a value somewhere."""
        return {name for line in self.lines for name in line if name != "step"}

    @property
    def step(self) -> int:
        """Of the last line; 0 without one."""
        return int(max((line["step"] for line in self.lines), default=0))

    @property
    def num_steps(self) -> int | None:
        """That the run is to make; None if it is not written down."""
        stated = self.settings.get("train.steps")
        return stated if isinstance(stated, int) else None

    @property
    def is_finished(self) -> bool:
        return self.num_steps is None or self.step >= self.num_steps

    @functools.cached_property
    def budgets(self) -> list[int]:
        """Tree budgets whose acceptance is logged, increasing."""
        return sorted(number for number, _ in self._numbered("validation/tree_acceptance_"))

    @functools.cached_property
    def tree_budget(self) -> int | None:
        """The budget that checkpoints are compared at; for a run that does not say, the middle one of those logged."""
        if not self.budgets:
            return None
        stated = self.settings.get("train.tree_budget")
        return stated if stated in self.budgets else self.budgets[len(self.budgets) // 2]

    @functools.cached_property
    def evaluations(self) -> list[dict[str, float]]:
        return [line for line in self.lines if any(n.startswith("validation/") for n in line)]

    def curve(self, name: str) -> Points:
        """(step, value) of its finite values."""
        return [
            (line["step"], line[name])
            for line in self.lines
            if name in line and math.isfinite(line[name])
        ]

    def last(self, name: str) -> float | None:
        points = self.curve(name)
        return points[-1][1] if points else None

    def best(self, name: str) -> tuple[float, float] | None:
        """(step, value) of the largest value."""
        return max(self.curve(name), key=lambda point: point[1], default=None)

    def _numbered(self, prefix: str) -> Iterator[tuple[int, str]]:
        for name in self.names:
            if found := re.fullmatch(re.escape(prefix) + r"(\d+)", name):
                yield int(found[1]), name


def numbered(line: Mapping[str, float], prefix: str) -> Points:
    """(number, value) of the metrics of one line that are `prefix` and a number, increasing."""
    found = [
        (float(name.removeprefix(prefix)), value)
        for name, value in line.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit() and math.isfinite(value)
    ]
    return sorted(found)


def read_run(folder: Path) -> RunLog:
    """Of a run's folder. Raises FileNotFoundError or ValueError in one line."""
    path = folder / "logs" / "train.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {folder} is no folder of a run that has trained; give one, e.g. outputs/demo"
        )
    lines = read_step_log(path)
    about = folder / "logs" / "run.json"
    value = read_json(about, REMEDY) if about.is_file() else {"name": folder.name, "settings": {}}
    with fields_of(about, REMEDY):
        name, settings = str(value["name"]), dict(value["settings"])
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    return RunLog(name, path, lines, settings, written)


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """Runs that are laid over each other; those of one name are told apart by their folders. Raises as `read_run`."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({folder})")
        for run, folder in zip(runs, folders, strict=True)
    ]


def write_run_facts(config: Config) -> None:
    """logs/run.json, which tells the page what the run is."""
    sections = {name: config.model_dump(mode="json")[name] for name in ("run", "drafter", "train")}
    settings = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key, value in keys.items()
    }
    about = {"name": config.run.name, "settings": settings}
    write_json(config.run.folder / "logs" / "run.json", about)
