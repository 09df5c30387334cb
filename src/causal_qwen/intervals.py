"""Intervals of numbers: from a level to the ends of an interval, and whether it can be trusted.

The law's own interval is loc_Y ± tan(π·level/2)·scale_Y. A conformal map replaces the multiple by
standardised residuals r = |g(v) − loc_Y|/scale_Y that no fit had seen: numbers set aside (split conformal: a
quantile of them), or each training number under a head that was solved without its fold (CV+: quantiles of
that head's loc_Y ± r·scale_Y). Whatever the law gets wrong, the interval then covers a new, exchangeable
number. Numbers may be divided into groups by their loc_Y, each with the residuals of its own (Mondrian).

A row beyond what training has seen is not exchangeable: its interval is the law's, widened by its leverage.
This module knows the laws; it does not know models, nor where residuals come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, central_multiple
from causal_qwen.heads import ActionNetwork
from causal_qwen.value_space import ValueSpace

__all__ = [
    "LARGEST_SHIFT",
    "Numbers",
    "cv_plus",
    "farthest",
    "give_up_where_moved",
    "interval",
    "interval_kind",
    "leverage",
    "multiple",
    "read_numbers",
    "report",
]

# Of a number in another precision, in widths of its 90% interval: what is less does not matter.
LARGEST_SHIFT = 0.1
# (n + 1)·level is meant as a decimal number: 100·0.29 must not become 29.000000000000004 and then rank 30.
DIGITS = 9
# Medians and interval ends stay within this many times the range of the training numbers, around its middle.
MOST_RANGES = 10.0
ROUNDING = 1e-6  # of the range of the training numbers: a median so far beyond it is on its border


class Numbers(NamedTuple):
    """Numbers as they are reported, (...) each, float64."""

    median: Tensor
    lower: Tensor
    upper: Tensor
    extrapolates: Tensor | None  # whether it lies beyond what training has seen; None where nobody knows


def multiple(level: float, scores: Sequence[float] | None = None) -> float:
    """The ⌈(n + 1)·level⌉-th smallest of n scores; without scores, tan(π·level/2).

    Where that rank exceeds n no finite multiple is valid for every law; it is then the larger of the largest
    score and the Cauchy multiple, so that a higher level never gets a narrower interval.

    Args:
        level: Probability of the interval, in (0, 1).
        scores: Standardised residuals, sorted; None or none at all for the law itself.

    Raises:
        ValueError: If ``level`` is not inside (0, 1).
    """
    of_the_law = central_multiple(level)
    if not scores:
        return of_the_law
    rank = _rank(level, len(scores))
    return scores[rank - 1] if rank <= len(scores) else max(scores[-1], of_the_law)


def interval(Y: Cauchy, level: float, scores: Sequence[float] | None = None) -> tuple[Tensor, Tensor]:
    """loc_Y ∓ scale_Y·multiple(level, scores), in value space.

    Args:
        Y: The number's law, any shape.
        level: Probability of the interval, in (0, 1).
        scores: Standardised residuals, sorted; None for the law itself.
    """
    half_width = Y.scale * multiple(level, scores)
    return Y.loc - half_width, Y.loc + half_width


def cv_plus(
    Y: Cauchy, fold_locs: Tensor, level: float, scores: Sequence[float], folds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Ends between which all but a share of the n numbers loc_k(i) ∓ r_i·scale_Y lie, in value space.

    The ⌈(n + 1)·level⌉-th smallest of the upper ones and the same rank, from above, of the lower ones.

    Args:
        Y: The number's law, any shape (...).
        fold_locs: (..., K) loc_Y by the head without each fold.
        level: Probability of the interval, in (0, 1).
        scores: n standardised residuals.
        folds: The fold of each.
    """
    rank = _rank(level, len(scores))
    if rank > len(scores):
        return interval(Y, level, sorted(scores))
    residuals = torch.tensor(scores, dtype=torch.float64, device=Y.loc.device)
    locs = fold_locs.double()[..., torch.tensor(folds, device=Y.loc.device)]  # (..., n)
    reach = residuals * Y.scale.double().unsqueeze(-1)
    lower = -(reach - locs).kthvalue(rank).values
    return lower, (locs + reach).kthvalue(rank).values


def read_numbers(
    action: ActionNetwork, config: Any, U: Cauchy, Y: Cauchy, level: float, *, raw: bool = False
) -> Numbers:
    """What is reported of the numbers Y (...) of causes U' (..., D): medians, intervals, extrapolation.

    Args:
        action: The model's, with what its number head has seen.
        config: The model's.
        U: Causes that the numbers come from.
        Y: The numbers' laws.
        level: Probability of the intervals, in (0, 1).
        raw: Whether intervals are the Cauchy law's own.
    """
    return report(config, Y, action.fold_numbers(U), leverage(action, U), level, raw=raw)


def leverage(action: ActionNetwork, U: Cauchy) -> Tensor | None:
    """How far causes U' (..., D) lie from what the number head has seen, (...), 1 at its border."""
    return action.support(U.loc).clamp(max=1e12).double() if action.support.is_known else None


def report(
    config: Any, Y: Cauchy, fold_locs: Tensor, reach: Tensor | None, level: float, *, raw: bool = False
) -> Numbers:
    """`read_numbers` of numbers Y (...) whose loc_Y by fold (..., K) and leverage (...) are known."""
    space = ValueSpace(config.value_space, config.value_center, config.value_spread)
    law = interval(Y, level)
    ends = law if raw or not config.conformal_scores else _calibrated(config, Y, fold_locs, level)
    median, limits = space.decode(Y.loc), config.value_range
    if limits is None or reach is None:
        return Numbers(median, space.decode(ends[0]), space.decode(ends[1]), None)
    slack = ROUNDING * (limits[1] - limits[0])
    extrapolates = (reach > 1) | (median < limits[0] - slack) | (median > limits[1] + slack)
    half = (law[1] - Y.loc).double() * reach.clamp(min=1).sqrt()
    calibrated = [end.double() for end in ends]
    # Never narrower than for a row that is like those of training.
    lower = space.decode(
        torch.where(extrapolates, torch.minimum(Y.loc.double() - half, calibrated[0]), calibrated[0])
    )
    upper = space.decode(
        torch.where(extrapolates, torch.maximum(Y.loc.double() + half, calibrated[1]), calibrated[1])
    )
    low, high = farthest(limits)
    median, lower, upper = (column.clamp(low, high) for column in (median, lower, upper))
    return Numbers(median, lower, upper, extrapolates)


def _calibrated(config: Any, Y: Cauchy, fold_locs: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Ends of the conformal intervals of numbers Y (...), those of each group by its own scores."""
    scores, folds, edges = config.conformal_scores, config.conformal_folds, config.conformal_edges
    if edges is None:
        return interval(Y, level, scores) if folds is None else cv_plus(Y, fold_locs, level, scores, folds)
    lower, upper = (torch.empty_like(Y.loc, dtype=torch.float64) for _ in range(2))
    group = torch.bucketize(Y.loc.double(), torch.tensor(edges, dtype=torch.float64, device=Y.loc.device))
    for index in range(len(edges) + 1):
        at = group == index
        own = [place for place, of in enumerate(config.conformal_groups) if of == index]
        own_scores = [scores[place] for place in own]
        if folds is None:
            ends = interval(Y[at], level, own_scores)
        else:
            ends = cv_plus(Y[at], fold_locs[at], level, own_scores, [folds[place] for place in own])
        lower[at], upper[at] = (end.double() for end in ends)
    return lower, upper


def farthest(limits: Sequence[float]) -> tuple[float, float]:
    """The ends that no reported number leaves: ten times the range [smallest, largest], around its middle."""
    middle, half = (limits[0] + limits[1]) / 2, (limits[1] - limits[0]) / 2
    reach = MOST_RANGES * (half or abs(middle) or 1.0)
    return middle - reach, middle + reach


def interval_kind(config: Any) -> str:
    """How a model's intervals are calibrated, in a phrase."""
    if config.conformal_scores is None:
        return "quantiles of the Cauchy law"
    count, edges = len(config.conformal_scores), config.conformal_edges
    groups = "" if edges is None else f", in {len(edges) + 1} groups by what is predicted"
    if config.conformal_folds is None:
        return f"split conformal, from {count} numbers set aside{groups}"
    return f"CV+, from {count} training numbers, each by a head solved without it{groups}"


def _rank(level: float, count: int) -> int:
    central_multiple(level)  # names a level that is none
    return max(math.ceil(round((count + 1) * level, DIGITS)), 1)


def give_up_where_moved(config: Any, precision: str) -> str | None:
    """Drop the calibration of a model whose numbers a precision moves too far, and say so.

    Args:
        config: The model's, which knows by how much since it was trained; changed in place.
        precision: "bfloat16", "int8", …
    """
    shifts = config.precision_shifts or {}
    if shifts and precision.startswith("int") and precision not in shifts:
        return (
            f"how far {precision} moves this model's numbers was not measured when it was trained: "
            "evaluate it in that precision"
        )
    shift = shifts.get(precision, 0.0)
    if shift <= LARGEST_SHIFT or config.conformal_scores is None:
        return None
    for name in ("scores", "folds", "edges", "groups"):
        setattr(config, f"conformal_{name}", None)
    return (
        f"in {precision} this model's numbers move by {shift:.2g} widths of their 90% interval: "
        "intervals are those of the Cauchy law, not calibrated; float32 has those of training"
    )
