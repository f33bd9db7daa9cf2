"""What an evaluation settles before it begins: the drafter's temperatures and the cost of a round.

Both are found once, by the main rank, and kept beside the records that depend on them: every rank, and every run that
continues this evaluation, reads the same numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.files import fields_of, read_json, write_json
from common.fingerprint import fingerprint
from configs.schema import EvaluationSection
from data.features import FeatureSet
from ddtree.cost import RoundCost
from drafter.model import Drafter
from evaluation.calibration import TemperatureFit, fit_temperatures
from evaluation.costs import MeasuredCost, read_costs
from target.head import TargetHead

logger = logging.getLogger(__name__)

REMEDY = "remove it and run `./launch.sh evaluate` again"
MIN_ANCHORS_PER_ROW = 8


@dataclass(frozen=True)
class Tuning:
    drafter_temperature: float | tuple[float, ...] = 1.0
    """Of all slots, or one a slot, fitted."""
    cost: RoundCost | None = None
    """For tree_cost; None where it is not evaluated."""


@dataclass(frozen=True)
class TuningFiles:
    """Where an evaluation keeps what it settled."""

    folder: Path
    section: EvaluationSection

    @property
    def temperatures(self) -> Path:
        return self.folder / "temperatures.json"

    @property
    def costs(self) -> Path:
        """Measured here, or the file that the recipe names."""
        return self.section.cost_file or self.folder / "costs.json"

    @property
    def needs_fit(self) -> bool:
        return self.section.drafter_temperature == "fit"

    @property
    def needs_costs(self) -> bool:
        return "tree_cost" in self.section.acceptors

    def read(self) -> Tuning:
        """Raises FileNotFoundError or ValueError in one line if something is missing or broken."""
        temperature = self.section.drafter_temperature
        return Tuning(
            _read_temperatures(self.temperatures) if temperature == "fit" else temperature,
            self.read_costs().round_cost() if self.needs_costs else None,
        )

    def read_costs(self) -> MeasuredCost:
        return read_costs(self.costs)

    def read_fit(self) -> dict[str, Any] | None:
        """temperatures.json's content, for the report; None without a fit."""
        return read_json(self.temperatures, REMEDY) if self.needs_fit else None


def settle(
    files: TuningFiles,
    fit: Callable[[], dict[str, Any]],
    measure: Callable[[Tuning], MeasuredCost],
) -> None:
    """Make what is missing: `fit` gives temperatures.json, `measure` the costs with those temperatures. Main rank only."""
    if files.needs_fit and not files.temperatures.is_file():
        write_json(files.temperatures, fit())
    if files.needs_costs and not files.costs.is_file():
        temperature = files.section.drafter_temperature
        found = _read_temperatures(files.temperatures) if temperature == "fit" else temperature
        write_json(files.costs, measure(Tuning(found)).to_json())


def fit_on_validation(
    drafter: Drafter, head: TargetHead, features: FeatureSet, num_anchors: int, budget: int
) -> dict[str, Any]:
    """temperatures.json: the fit and what it was made on. Raises ValueError without validation rows."""
    entries = features.of_split("validation")
    if not entries:
        raise ValueError(
            "evaluation.drafter_temperature=fit needs validation rows and the features have none; raise "
            "data.validation_fraction and run data and extract again, or give a number"
        )
    # fewer rows rather than fewer anchors a row: the first of a row's is the response's start, which is no typical place
    num_rows = min(len(entries), max(1, num_anchors // MIN_ANCHORS_PER_ROW))
    entries = [entries[i * len(entries) // num_rows] for i in range(num_rows)]
    rows = (features.read(entry) for entry in entries)
    found = fit_temperatures(drafter, head, rows, num_anchors // num_rows, budget)
    logger.info("%s", _describe(found))
    fitted_on = {
        "split": "validation",
        "num_rows": len(entries),
        "rows": fingerprint([entry.sample_id for entry in entries]),
    }
    return asdict(found) | {"fitted_on": fitted_on}


def _describe(fit: TemperatureFit) -> str:
    before, after = (_mean(losses, fit.num_tokens) for losses in (fit.nll_before, fit.nll_after))
    values = ", ".join(f"{value:.2f}" for value in fit.temperatures)
    return (
        f"drafter temperatures a slot fitted on {max(fit.num_tokens)} validation anchors, where walks of trees "
        f"of {fit.budget} get: {values}; "
        f"loss {before:.4f} -> {after:.4f} nats a token"
    )


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)


def _read_temperatures(path: Path) -> tuple[float, ...]:
    value = read_json(path, REMEDY)
    with fields_of(path, REMEDY):
        found = tuple(value["temperatures"])
        is_sound = all(0 < temperature < math.inf for temperature in found)
    if not is_sound:
        raise ValueError(f"{path} holds temperatures that no fit gives: {list(found)}; {REMEDY}")
    return found
