"""Looking at a comparison before its end: boundaries, and an interval that looking keeps valid.

At planned looks the difference is compared with boundaries that spend α = 1 − level little by little (Lan
and DeMets, 1983), α(s) = α·ln(1 + (e − 1)·s) after a share s of the individuals: near Pocock's constant
boundary, so that a clear difference ends the run early and no look decides far out in a tail that few
individuals cannot be trusted with. The interval after stopping is that of the stage-wise ordering
(Fairbanks and Madsen, 1982; Tsiatis, Rosner and Mehta, 1984): of all the outcomes that the design could have
had, those are counted that are as extreme as the one that it had. Without it an early stop reports a
difference that is too large in an interval that is too sure. This module knows numbers alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from causal_qwen.counterfactual.comparison.statistics import Interval, Mean

__all__ = ["Design", "Look", "planned_looks"]

NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)
FARTHEST = 12.0  # standard errors: beyond it nothing has probability
LEAST = 1e-250  # probability of a tail
FEWEST = 8  # individuals at a look
Vector = npt.NDArray[np.float64]


def planned_looks(individuals: int, looks: int) -> tuple[int, ...]:
    """After how many individuals one looks: at equal distances, the last at the end, none before `FEWEST`.

    Raises:
        ValueError: If there are too few individuals for a look before the end.
    """
    if looks < 2:
        raise ValueError(f"looks is {looks}; a sequential comparison looks at least twice")
    if individuals < 2 * FEWEST:
        raise ValueError(
            f"{individuals} individuals are too few to look before the end; give at least {2 * FEWEST}, "
            "or compare without looking"
        )
    looks = min(looks, individuals // FEWEST)
    return tuple(round(individuals * (index + 1) / looks) for index in range(looks))


@dataclass(frozen=True)
class Look:
    """What one look says.

    Args:
        design: Of the looks.
        index: Of this one.
        individuals: How many had answered each prompt.
        mean: Their mean difference.
    """

    design: Design
    index: int
    individuals: int
    mean: Mean

    @property
    def significant(self) -> bool:
        """Whether the boundary is crossed; then, and at the last look only then, `interval` excludes 0."""
        return self.mean.is_known and abs(self._z) >= self.design.boundaries[self.index]

    @property
    def repeated(self) -> Interval:
        """Valid at all looks at the same time, also for who stops for a reason of their own."""
        if not self.mean.is_known:
            return Interval(-math.inf, math.inf)
        reach = _student_quantile(self.design.boundaries[self.index], self.mean.freedom)
        return Interval(self.mean.end(reach), self.mean.end(-reach))

    @functools.cached_property
    def interval(self) -> Interval:
        """If the rule stops here: stage-wise."""
        if not self.mean.is_known:
            return Interval(-math.inf, math.inf)
        tail = (1 - self.design.level) / 2
        return Interval(self._end(tail), self._end(1 - tail))

    @functools.cached_property
    def unbiased(self) -> float:
        """The difference that overestimates as often as it underestimates, if the rule stops here."""
        return self._end(0.5) if self.mean.is_known else math.nan

    @functools.cached_property
    def _z(self) -> float:
        return _normal_quantile(self.mean.t, self.mean.freedom)

    def _end(self, probability: float) -> float:
        """The difference under which this outcome is exceeded with this probability."""
        drift = self.design.drift(self.index, self._z, probability)
        deviation = self._z - drift * math.sqrt(self.design.shares[self.index])
        return self.mean.end(_student_quantile(deviation, self.mean.freedom))


class Design:
    """When to look, and what each look may conclude.

    Args:
        looks: Individuals at each look, as from `planned_looks`.
        level: Of the intervals.
    """

    def __init__(self, looks: tuple[int, ...], *, level: float = 0.95) -> None:
        self.looks, self.level = looks, level
        self.shares = tuple(look / looks[-1] for look in looks)
        self.boundaries = _boundaries(self.shares, 1 - level)

    def look(self, index: int, mean: Mean) -> Look:
        """At look ``index``, by the mean difference of its individuals."""
        return Look(self, index, self.looks[index], mean)

    def exceedance(self, index: int, z: float, drift: float) -> float:
        """P(an outcome at least as high as stopping at ``index`` with z): above earlier, or here above z.

        Args:
            index: Of the look.
            z: Standardised difference there.
            drift: Mean of z at the last look.
        """
        above, density = 0.0, None
        for stage in range(index + 1):
            share = self.shares[stage]
            last = stage == index
            bound = z if last else self.boundaries[stage]
            above += _above(density, bound * math.sqrt(share), share, drift)
            if not last:
                density = _continued(density, self.boundaries[stage], share, drift)
        return above

    def drift(self, index: int, z: float, probability: float) -> float:
        """The drift under which an outcome is exceeded with this probability, as in `exceedance`."""
        root = math.sqrt(self.shares[index])

        def excess(drift: float) -> float:
            return self.exceedance(index, z, drift) - probability

        low, high = (z - FARTHEST) / root, (z + FARTHEST) / root
        if excess(low) > 0:  # an outcome that no drift of this reach explains
            return low
        if excess(high) < 0:
            return high
        return float(optimize.brentq(excess, low, high, xtol=1e-6))


@dataclass(frozen=True)
class _Density:
    """Of the score process z·√share among runs that go on, at nodes with their weights; at this share."""

    nodes: Vector
    weights: Vector  # density times quadrature weight
    share: float


def _above(before: _Density | None, bound: float, share: float, drift: float) -> float:
    """P(not stopped before, process above ``bound`` at ``share``)."""
    if before is None:
        return float(special.ndtr((drift * share - bound) / math.sqrt(share)))
    step = share - before.share
    tails = special.ndtr((before.nodes + drift * step - bound) / math.sqrt(step))
    return float(before.weights @ tails)


def _continued(before: _Density | None, bound: float, share: float, drift: float) -> _Density:
    """The density of runs within ±bound at ``share``, in units of z."""
    reach = bound * math.sqrt(share)
    nodes = NODES * reach
    if before is None:
        density = _normal(nodes - drift * share, share)
    else:
        step = share - before.share
        density = _normal(nodes[:, None] - before.nodes - drift * step, step) @ before.weights
    return _Density(nodes, density * WEIGHTS * reach, share)


def _normal(deviation: Vector, variance: float) -> Vector:
    density: Vector = np.exp(-(deviation**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    return density


@functools.cache
def _boundaries(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Where |z| stops the run at each look."""
    boundaries: list[float] = []
    density, spent = None, 0.0
    for share in shares:
        budget = alpha * math.log1p((math.e - 1) * share)
        amount = (budget - spent) / 2

        def excess(bound: float, before: _Density | None = density, share: float = share) -> float:
            return _above(before, bound * math.sqrt(share), share, 0.0)

        bound = _root(lambda value, excess=excess, amount=amount: excess(value) - amount)  # type: ignore[misc]
        boundaries.append(bound)
        density = _continued(density, bound, share, 0.0)
        spent = budget
    return tuple(boundaries)


def _root(function: Callable[[float], float]) -> float:
    return float(optimize.brentq(function, 0.0, FARTHEST, xtol=1e-9))


def _student_quantile(z: float, freedom: float) -> float:
    """The quantile of Student's law where the normal law has z, exact in both tails."""
    return math.copysign(float(special.stdtrit(freedom, special.ndtr(-abs(z)))), z)


def _normal_quantile(t: float, freedom: float) -> float:
    """The quantile of the normal law where Student's has t."""
    tail = max(float(special.stdtr(freedom, -abs(t))), LEAST)
    return math.copysign(float(special.ndtri(tail)), t)
