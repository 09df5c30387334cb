"""What pairing was worth: the variance ratio and the correlation of pairs, each with its interval.

Both are smooth functions of variances within prompts, and their intervals are a jackknife's with Student's
quantiles: of the logarithm of the ratio, and of Fisher's z of the correlation. A pair is left out at a time,
or where crossed an individual. Redrawing pairs instead would find no spread among two of a prompt, and too
little among few. This module knows numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

__all__ = ["Interval", "Worth", "worth"]

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]
TIE = 1e-12  # relative to the scores: what rounding leaves where there is no difference


class Interval(NamedTuple):
    """Two ends."""

    lower: float
    upper: float


LARGEST = 2.0  # ratio: of scores that are each other's opposite
UNKNOWN = Interval(math.nan, math.nan)


class Worth(NamedTuple):
    """NaN where the pairs do not say it."""

    ratio: float  # Var(A − B)/(Var A + Var B), within prompts
    ratio_ends: Interval
    correlation: float
    correlation_ends: Interval
    paired: float  # Var(A − B), mean over prompts


class _Variances(NamedTuple):
    """Within prompts, summed over them."""

    whole: float
    left_out: Matrix  # (n, P) without each pair, or (n, 1) without each individual


def worth(one: Matrix, other: Matrix, *, level: float, crossed: bool) -> Worth:
    """Of scores of A and of B, (individuals, prompts), NaN where missing in both; two of a prompt at least.

    Intervals need three in a prompt, or where crossed in every one.
    """
    there, tie = np.isfinite(one), TIE * float(np.nanmax(np.abs([one, other])))
    of = [_variances(scores, tie, crossed=crossed) for scores in (one, other, one - other)]
    whole, left_out = [found.whole for found in of], [found.left_out for found in of]
    counts = there.sum(0)
    if crossed:
        there, counts = np.ones((len(one), 1), dtype=bool), np.array([len(one) if counts.min() >= 3 else 0])
    known = counts >= 3
    ratio, correlation = float(_ratio(*whole)), float(_correlation(*whole))
    if not known.any() or not math.isfinite(ratio):
        return Worth(ratio, UNKNOWN, correlation, UNKNOWN, whole[2] / one.shape[1])
    freedom = float((counts[known] - 1).sum())
    reach = float(special.stdtrit(freedom, (1 + level) / 2))

    def ends(value: float, values: Matrix, least: float, most: float, bend: Bend) -> Interval:
        values = np.where(there, values, value)[:, known]
        if not (least < value < most and (values > least).all() and (values < most).all()):
            bend = STRAIGHT  # no logarithm of 0: of a single pair that differs, or of a correlation of 1
        bent = bend.forth(values)
        means = np.where(there[:, known], bent, 0.0).sum(0) / counts[known]
        squares = np.where(there[:, known], (bent - means) ** 2, 0.0).sum(0)
        variance = ((counts[known] - 1) / counts[known] * squares).sum() * len(counts) / known.sum()
        middle, error = bend.forth(np.array(value)), reach * math.sqrt(variance)
        lower, upper = (float(bend.back(middle + sign * error)) for sign in (-1, 1))
        return Interval(max(lower, least), min(upper, most))

    if ratio == 0:  # no pair differs: with this probability at most so many do, as strangers may
        share = 1 - (1 - level) ** (1 / int(np.isfinite(one).sum()))
        ratio_ends, correlation_ends = Interval(0.0, share), Interval(1 - share, 1.0)
    else:
        ratio_ends = ends(ratio, _ratio(*left_out), 0.0, LARGEST, LOGARITHM)
        correlation_ends = UNKNOWN
        if math.isfinite(correlation) and np.isfinite(correlations := _correlation(*left_out))[there].all():
            correlation_ends = ends(correlation, correlations, -1.0, 1.0, FISHER)
    return Worth(ratio, ratio_ends, correlation, correlation_ends, whole[2] / one.shape[1])


def _variances(scores: Matrix, tie: float, *, crossed: bool) -> _Variances:
    there = np.isfinite(scores)
    counts = there.sum(0)
    centred = np.where(there, scores - np.nanmean(scores, 0), 0.0)
    squares = np.where(np.abs(centred) > tie, centred, 0.0) ** 2
    within = squares.sum(0) / (counts - 1)  # (P,)
    rest = (counts - 1) * within - counts / (counts - 1) * squares
    # What a difference of large numbers leaves is none.
    rest = np.where(rest > TIE * squares.sum(0), rest, 0.0) / np.maximum(counts - 2, 1)
    left_out = np.where(there, rest, within)  # who is not there changes nothing
    if crossed:
        return _Variances(float(within.sum()), left_out.sum(1, keepdims=True))
    return _Variances(float(within.sum()), within.sum() - within + left_out)


class Bend(NamedTuple):
    """A scale on which an estimate is nearly normal, there and back."""

    forth: Callable[[Matrix], Matrix]
    back: Callable[[Matrix], Matrix]


STRAIGHT = Bend(lambda value: value, lambda value: value)
LOGARITHM = Bend(np.log, np.exp)
FISHER = Bend(np.arctanh, np.tanh)


def _ratio(of_one: Matrix | float, of_other: Matrix | float, of_difference: Matrix | float) -> Matrix:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: Matrix = np.divide(of_difference, np.add(of_one, of_other))
    return ratio


def _correlation(of_one: Matrix | float, of_other: Matrix | float, of_difference: Matrix | float) -> Matrix:
    covariance = (np.add(of_one, of_other) - of_difference) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: Matrix = np.divide(covariance, np.sqrt(np.multiply(of_one, of_other)))
    return correlation
