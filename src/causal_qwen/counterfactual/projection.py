"""The smallest noise under which linear constraints hold, and one-dimensional draws around it.

This module knows neither models nor tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Projection", "conditional_draw", "interval"]

Array = npt.NDArray[np.float64]


class Projection:
    """argmin ‖ε‖² subject to n·ε ≥ h for every constraint, and |ε_j| ≤ bound.

    By the dual active-set method of Goldfarb and Idnani (1983); quadprog, which begins anew in each round and
    takes bounds as dense constraints, gives the same points in 6 to 90 times the time (576 dimensions).
    Constraints may come in rounds. Each round starts from the last optimum, and no step is wasted: the
    multipliers stay valid. It ends after finitely many steps, at the optimum or with the proof that there is
    none.

    Args:
        size: D.
        bound: Largest |ε_j|; ∞ for none.
    """

    def __init__(self, size: int, bound: float) -> None:
        self.point: Array = np.zeros(size)
        self.bound = bound
        self._rows: Array = np.zeros((0, size))
        self._floors: Array = np.zeros(0)
        self._active: Array = np.zeros((0, size))
        self._multipliers: Array = np.zeros(0)

    def add(self, rows: Array, floors: Array) -> bool:
        """Require rows·ε ≥ floors, (m, D) and (m,), besides what was required before; False if no ε does."""
        lengths = np.linalg.norm(rows, axis=1)
        empty = lengths < 1e-12
        if np.any(floors[empty] > 0):
            return False
        rows, floors, lengths = rows[~empty], floors[~empty], lengths[~empty]
        self._rows = np.concatenate([self._rows, rows / lengths[:, None]])
        self._floors = np.concatenate([self._floors, floors / lengths])
        tolerance = 1e-9 * (1 + np.abs(self._floors).max(initial=0.0))
        for _ in range(50 * (len(self.point) + len(self._rows))):
            violated = self._most_violated(tolerance)
            if violated is None:
                return True
            if not self._enforce(*violated):
                return False
        return False  # only rounding can bring a cycle: nothing that could be replayed

    def _most_violated(self, tolerance: float) -> tuple[Array, float] | None:
        lacks = self._floors - self._rows @ self.point
        worst = int(lacks.argmax()) if len(lacks) else -1
        outside = np.abs(self.point) - self.bound
        widest = int(outside.argmax())
        if worst >= 0 and lacks[worst] > max(tolerance, outside[widest]):
            return self._rows[worst], float(self._floors[worst])
        if outside[widest] > tolerance:
            row = np.zeros_like(self.point)
            row[widest] = -math.copysign(1.0, self.point[widest])
            return row, -self.bound
        return None

    def _enforce(self, row: Array, floor: float) -> bool:
        """Move to where row·ε = floor, dropping active constraints that no longer push; False if none can."""
        multiplier = 0.0
        while True:
            pull = (
                np.linalg.solve(self._active @ self._active.T, self._active @ row)
                if len(self._active)
                else self._multipliers
            )  # (q,)
            direction = row - self._active.T @ pull  # (D,), what the active constraints leave free
            slope = float(direction @ direction)
            yields = np.flatnonzero(pull > 1e-12)
            ratios = self._multipliers[yields] / pull[yields]
            until_drop = float(ratios.min()) if len(ratios) else math.inf
            until_met = (floor - float(row @ self.point)) / slope if slope > 1e-10 else math.inf
            length = min(until_drop, until_met)
            if length == math.inf:
                return False
            if until_met < math.inf:
                self.point = self.point + length * direction
            self._multipliers = self._multipliers - length * pull
            multiplier += length
            if until_met <= until_drop:
                self._active = np.concatenate([self._active, row[None]])
                self._multipliers = np.append(self._multipliers, multiplier)
                return True
            dropped = int(yields[ratios.argmin()])
            self._active = np.delete(self._active, dropped, axis=0)
            self._multipliers = np.delete(self._multipliers, dropped)


def interval(slopes: Array, gaps: Array) -> tuple[float, float]:
    """The t for which gaps + t·slopes ≥ 0, a segment around 0.

    Args:
        slopes: (m,).
        gaps: (m,) > 0. Then −gap/slope is largest (smallest) where slope/gap is, so two extremes of one
            quotient do.
    """
    if len(gaps) == 0:
        return -math.inf, math.inf
    quotients = slopes / gaps
    steepest, shallowest = float(quotients.max()), float(quotients.min())
    return (-1 / steepest if steepest > 0 else -math.inf), (-1 / shallowest if shallowest < 0 else math.inf)


def conditional_draw(low: float, high: float, uniform: float) -> tuple[float, float]:
    """ε ~ standard Cauchy given low ≤ ε ≤ high, by inversion in the angle; and that interval's prior mass.

    Args:
        low: May be −∞.
        high: May be ∞.
        uniform: In [0, 1).
    """
    first, last = math.atan(low), math.atan(high)
    return min(max(math.tan(first + uniform * (last - first)), low), high), (last - first) / math.pi
