"""Linear regression by maximum Cauchy likelihood: y ~ Cauchy(w·x + b, β), with a ridge on w.

A Cauchy is a normal law whose precision is itself random. Expectation–maximisation therefore alternates a
ridge regression with weights ω_i = 2/(1 + e_i²/β²) and the β that makes the residuals e likeliest: a label
far off the line weighs next to nothing, where squared error would bend the line to it.

In the weights e_i is the *left-out* residual, of row i by the fit to all others, in closed form. With fewer
rows than features every residual of the fit itself can be made small, wrong labels' too; those of left-out
rows cannot. Closed form means with the weights of all rows, though, and rows that fit by chance have large
ones: as a measure of error these residuals are too small, by half where rows are about as many as features.
Strength of the ridge, β and intervals therefore come from *folds*, whose weights are solved without them.

Wrong labels that weigh nothing still count in a likelihood: to allow for them β is too wide, and the ridge
that it chooses too strong. So labels whose left-out residuals are not *believed* (`belief`) are dropped, and
everything is solved again without them, until the same labels are believed. Where all are, nothing changes.

This module does not know models, nor how a weighted ridge is solved (`ridge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.belief import WrongLabels, believe, cauchy_scale
from causal_qwen.calibration.ridge import BLOCK, Penalty, Problem, Solver, problem_of

__all__ = ["CauchyRegression", "cauchy_regression"]

# Ridges that are tried, strongest first, relative to the largest eigenvalue of the features' scatter.
STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(2, 15))
FOLDS = 10
# Where rows outnumber features four fifths of them say as much about the ridge, for half the time.
FEWER_FOLDS = 5
# The ridge once chosen, folds are made anew, smaller: residuals of nine tenths of few rows are too large.
FINAL_FOLDS = 40
# Beyond this many rows per feature the closed form is as good as folds to choose by.
ROWS_PER_FEATURE = 10
MOST_ITERATIONS = 20
TOLERANCE = 0.01  # of a weight, between 0 and 2
MOST_ROUNDS = 4  # in which labels that are not believed are dropped


class CauchyRegression(NamedTuple):
    """y ~ Cauchy(slope·x + intercept, scale)."""

    slope: Tensor  # (H,) w
    intercept: float  # b, not penalised
    scale: float  # β of a new row whose label is right
    left_out: Tensor  # (N,) e, each row's residual by a fit without it
    weights: Tensor  # (N,) ω: 2 on the line, 0 far off it and where a label is not believed
    believed: Tensor  # (N,) labels that the line was fitted to
    wrong: WrongLabels | None  # law of those that are not; None where there are none
    strength: float  # of the ridge, relative
    ridge: float  # the same, absolute
    log_likelihood: float  # of a left-out row, mean of those believed
    fold: Tensor  # (N,) the fold that each row was left out with; empty without folds
    fold_slopes: Tensor  # (K, H) of the fits without each fold
    fold_intercepts: Tensor  # (K,)


def cauchy_regression(
    features: Tensor,
    target: Tensor,
    *,
    strengths: Sequence[float] = STRENGTHS,
    noise: Tensor | None = None,
    residuals: Tensor | None = None,
    groups: Tensor | None = None,
    folds: int | None = None,
    doubt: bool = True,
    seed: int = 0,
) -> CauchyRegression:
    """w, b and β of the ridge under which left-out rows are likeliest.

    Args:
        features: (N, H), any float dtype, in memory or mapped from a file.
        target: (N,).
        strengths: Ridges to choose from, strongest first, each started from the one before: the first line
            is nearly flat and cannot follow wrong labels.
        noise: (H, H) second moment of an error in the features that a prediction has to survive, such as
            rounding; N times it is added to the ridge, which is what fitting to noisy copies of the rows
            amounts to.
        residuals: (N,) of a line to begin with, which saves iterations where it is near; None begins with the
            median of the target.
        groups: (N,) of which group each row is, from 0. A fold leaves out whole groups: numbers of one text
            know of each other, and would make a line look better than it is on another text.
        folds: How many; None makes ten to choose the ridge (five where rows outnumber features) and forty
            under it, as far as there are rows; where there are more than ten rows per feature, none and ten.
            0 takes residuals in closed form.
        doubt: Whether labels that are more probably wrong than right are dropped.
        seed: Of the folds.

    Raises:
        ValueError: If there are fewer than three rows, or one is not finite.
    """
    count, width = features.shape
    if count < 3:
        raise ValueError(f"{count} rows; a regression with left-out residuals needs at least 3")
    y = target.double()
    mean = torch.stack([block.double().sum(0) for block in features.split(BLOCK)]).sum(0) / count
    if not (torch.isfinite(mean).all() and torch.isfinite(y).all()):
        raise ValueError("a feature or a target is NaN or infinite; a regression needs finite numbers")
    final = folds or 0
    if folds is None:
        folds, final = (FOLDS if count <= width else FEWER_FOLDS, FINAL_FOLDS)
        if count > ROWS_PER_FEATURE * width:
            folds, final = 0, FOLDS
    groups = torch.arange(count) if groups is None else groups.cpu()
    apart = int(groups.max()) + 1
    folds, final = (many if apart >= max(many, 3) else apart * (apart >= 3) for many in (folds, final))
    order = torch.randperm(apart, generator=torch.Generator().manual_seed(seed))
    fold, final_fold = (
        (torch.arange(apart) % max(many, 1))[order][groups].to(y.device) for many in (folds, final)
    )
    if float(y.min()) == float(y.max()):
        return _flat(y, width, strengths[0], final_fold, final)
    everything = problem_of(features, mean, y)
    begin = None if residuals is None else residuals.double()
    rows = _Rows(everything, y, torch.ones_like(y, dtype=torch.bool))
    choosing = fold if folds else None
    chosen = _likeliest(rows, strengths, noise, begin, choosing)
    # Of labels that are mostly one number, such as none of a rare event, others are not wrong for being rare.
    doubt = doubt and not _most_are_equal(y)
    for _ in range(MOST_ROUNDS - 1 if doubt else 0):
        believed = believe(chosen.left_out, y).believed
        if bool((believed == rows.believed).all()):
            break
        rows = _Rows(everything.without(~believed), y, believed)
        chosen = _likeliest(rows, strengths, noise, chosen.left_out, choosing, begin_at=chosen.strength)

    penalty, left_out = chosen.penalty, chosen.left_out
    slope, intercept = rows.problem.under(penalty).line(chosen.weights)
    fold_slopes, shifts = y.new_empty(0, width), y.new_empty(0)
    if final:
        left_out, lines = _by_fold(rows, final_fold, penalty, chosen.weights)
        fold_slopes, shifts = (torch.stack(column) for column in zip(*lines, strict=True))
    belief = believe(left_out, y) if doubt else None
    return CauchyRegression(
        slope=slope,
        intercept=float(intercept - mean @ slope),
        scale=belief.scale if belief else cauchy_scale(left_out),
        left_out=left_out,
        weights=y.new_zeros(count).masked_scatter(rows.believed, chosen.weights),
        believed=rows.believed,
        wrong=belief.wrong if belief else None,
        strength=chosen.strength,
        ridge=float(penalty.ridge),
        log_likelihood=float(_log_likelihood(left_out[rows.believed]).mean()),
        fold=final_fold if final else final_fold[:0],
        fold_slopes=fold_slopes,
        fold_intercepts=shifts - fold_slopes @ mean,
    )


class _Rows(NamedTuple):
    """Rows whose labels are believed."""

    problem: Problem  # of these alone
    y: Tensor  # (N,) targets of all
    believed: Tensor  # (N,) which they are


class _Candidate(NamedTuple):
    strength: float
    penalty: Penalty
    weights: Tensor  # of the rows believed
    left_out: Tensor  # (N,) of all
    log_likelihood: Tensor  # scalar, mean of the rows believed


def _likeliest(
    rows: _Rows,
    strengths: Sequence[float],
    noise: Tensor | None,
    residuals: Tensor | None,
    fold: Tensor | None,
    *,
    begin_at: float | None = None,
) -> _Candidate:
    """Of the strengths, the one under which left-out labels are likeliest; without folds in closed form.

    With ``begin_at``, which was the likeliest with other labels believed, only as far as it gets better.
    """
    believed, count = rows.believed, int(rows.believed.sum())
    known = rows.y[believed]
    if residuals is not None:
        weights = _weights(residuals[believed])
    elif _most_are_equal(known):  # beside a median that most labels are, all others would weigh nothing
        weights = torch.ones_like(known)
    else:
        weights = _weights(known - known.median())

    def candidate(strength: float, weights: Tensor) -> _Candidate:
        # The scatter of fewer rows is smaller by their share.
        largest = rows.problem.largest * (count / len(believed))
        penalty = Penalty.of(strength * largest, noise, count)
        solver = rows.problem.under(penalty)
        weights, closed = _settle(solver, weights)
        if fold is None:
            left_out = torch.empty_like(rows.y).masked_scatter(believed, closed)
            left_out[~believed] = rows.problem.residuals(*solver.line(weights), ~believed)
        else:
            left_out, _ = _by_fold(rows, fold, penalty, weights)
        return _Candidate(strength, penalty, weights, left_out, _log_likelihood(left_out[believed]).mean())

    candidates: dict[int, _Candidate] = {}

    def best(tried: Iterable[int], weights: Tensor) -> int:
        for index in tried:
            if 0 <= index < len(strengths) and index not in candidates:
                candidates[index] = candidate(strengths[index], weights)
                weights = candidates[index].weights
        return max(candidates, key=lambda index: float(candidates[index].log_likelihood))

    every = range(len(strengths))
    if begin_at is not None:
        place = best([strengths.index(begin_at)], weights)
    elif count <= rows.problem.width:
        return candidates[best(every, weights)]
    else:  # many rows leave little doubt about the ridge: every other one, then those beside the likeliest
        place = best(every[::2], weights)
    while (better := best((place - 1, place + 1), candidates[place].weights)) != place:
        place = better
    return candidates[place]


def _by_fold(
    rows: _Rows, fold: Tensor, penalty: Penalty, weights: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Each row's residual by the fit without its fold (N,), and the lines of these fits."""
    left_out, lines = torch.empty_like(rows.y), []
    for k in range(int(fold.max()) + 1):
        outside = fold == k
        solver = rows.problem.without(outside).under(penalty)
        lines.append(solver.line(_settle(solver, weights[~outside[rows.believed]])[0]))
        left_out[outside] = rows.problem.residuals(*lines[-1], outside)
    return left_out, lines


def _settle(solver: Solver, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that their own left-out residuals give again, and those residuals."""
    for _ in range(MOST_ITERATIONS):
        used = weights
        left_out = solver.left_out(used)
        weights = _weights(left_out)
        if (weights - used).abs().max() < TOLERANCE:
            break
    return used, left_out


def _weights(residuals: Tensor) -> Tensor:
    return 2 / (1 + (residuals / cauchy_scale(residuals)).square())


def _log_likelihood(residuals: Tensor) -> Tensor:
    beta = cauchy_scale(residuals)
    return -math.log(math.pi * beta) - (residuals / beta).square().log1p()


def _most_are_equal(target: Tensor) -> bool:
    return bool((target == target.median()).double().mean() >= 0.5)


def _flat(y: Tensor, width: int, strength: float, fold: Tensor, folds: int) -> CauchyRegression:
    """The line through targets that are all equal."""
    return CauchyRegression(
        slope=y.new_zeros(width),
        intercept=float(y[0]),
        scale=0.0,
        left_out=torch.zeros_like(y),
        weights=torch.full_like(y, 2.0),
        believed=torch.ones_like(y, dtype=torch.bool),
        wrong=None,
        strength=strength,
        ridge=0.0,
        log_likelihood=math.inf,
        fold=fold if folds else fold[:0],
        fold_slopes=y.new_zeros(folds, width),
        fold_intercepts=y[:1].expand(folds),
    )
