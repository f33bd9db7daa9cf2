"""The rising convex curve nearest to measured points: what a cost must be for a search to be able to stop.

A rising convex function that is linear between the points is a sum of hinges, a + sum_j b_j max(x - x_j, 0), with all
weights >= 0. Fitting it is therefore non-negative least squares, solved exactly by the active-set method of Lawson and
Hanson (Solving Least Squares Problems, 1974, chapter 23); a dozen points need no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fit_convex(x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """Values at 0, 1, ..., max(x) of the rising convex piecewise linear function with the least relative squared error.

    x: distinct, rising whole numbers from 0 on; y: positive. Raises ValueError if they are not.
    """
    places, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if places[0] != 0 or (np.diff(places) <= 0).any() or not (values > 0).all():
        raise ValueError(
            f"costs {list(y)} at {list(x)} nodes: give positive costs at rising sizes from 0 on"
        )
    # relative errors: the largest size would otherwise outvote the small ones, which are what is mostly chosen
    weights = _non_negative_least_squares(
        _hinges(places, places) / values[:, None], np.ones_like(values)
    )
    return _hinges(np.arange(places[-1] + 1), places) @ weights


def _hinges(at: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(len(at), len(places)): a constant, then a hinge at every place but the last."""
    hinges = np.maximum(at[:, None] - places[:-1], 0)
    return np.concatenate([np.ones((len(at), 1)), hinges], axis=1)


def _non_negative_least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The w >= 0 that minimises |matrix @ w - wanted|."""
    scale = np.linalg.norm(
        matrix, axis=0
    )  # columns of one length, so that one tolerance serves all
    columns = matrix / scale
    w, free = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], dtype=bool)
    tolerance = 1e-10 * np.linalg.norm(wanted)
    while True:
        slope = columns.T @ (wanted - columns @ w)
        slope[free] = 0
        if slope.max() <= tolerance:
            return w / scale
        free[slope.argmax()] = True
        w, free = _step_to_feasible(columns, wanted, w, free)


def _step_to_feasible(
    columns: np.ndarray, wanted: np.ndarray, w: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least squares over the free weights; those that would turn negative are stopped at 0 and held, one by one."""
    while True:
        goal = np.zeros_like(w)
        goal[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        blocked = free & (goal <= 0)
        if not blocked.any():
            return goal, free
        reach = w[blocked] / (w[blocked] - goal[blocked])
        w = w + reach.min() * (goal - w)
        free = free & (w > 1e-15)
        w = np.where(free, w, 0.0)
