"""Linear regression by maximum Cauchy likelihood: y ~ Cauchy(w·x + b, β), with a ridge on w.

A Cauchy is a normal law whose precision is itself random. Expectation–maximisation therefore alternates a
ridge regression with weights ω_i = 2/(1 + e_i²/β²) and the β that makes the residuals e likeliest: a label
far off the line weighs next to nothing, where squared error would bend the line to it.

In the weights e_i is the *left-out* residual, of row i by the fit to all others, in closed form. With fewer
rows than features every residual of the fit itself can be made small, wrong labels' too; those of left-out
rows cannot. Closed form means with the weights of all rows, though, and rows that fit by chance have large
ones: as a measure of error these residuals are too small, by half where rows are about as many as features.
Strength of the ridge, β and intervals therefore come from *folds*, whose weights are solved without them.

Few rows are solved in the dual (N × N), many in the primal (H × H), which reads the features in blocks:
they may be mapped from a file. All in float64. This module does not know models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["CauchyRegression", "cauchy_regression", "cauchy_scale"]

# Ridges that are tried, strongest first, relative to the largest eigenvalue of the features' scatter.
STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(2, 15))
FOLDS = 10
# The ridge once chosen, folds are made anew, smaller: residuals of nine tenths of few rows are too large.
FINAL_FOLDS = 40
# Beyond this many rows per feature the closed form is as good as folds to choose by.
ROWS_PER_FEATURE = 10
MOST_ITERATIONS = 20
TOLERANCE = 0.01  # of a weight, between 0 and 2
BLOCK = 8192  # rows of features that are read at a time
# β relative to the largest residual: what is narrower is rounding.
NARROWEST = 1e-9


class CauchyRegression(NamedTuple):
    """y ~ Cauchy(slope·x + intercept, scale)."""

    slope: Tensor  # (H,) w
    intercept: float  # b, not penalised
    scale: float  # β of a new row
    left_out: Tensor  # (N,) e, each row's residual by a fit without it
    weights: Tensor  # (N,) ω: 2 on the line, 0 far off it
    strength: float  # of the ridge, relative
    ridge: float  # the same, absolute
    log_likelihood: float  # of a left-out row, mean
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
        folds: How many; None makes ten to choose the ridge and forty under it, as far as there are rows;
            where there are more than ten rows per feature, none and ten. 0 takes residuals in closed form.
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
        folds, final = (FOLDS, FINAL_FOLDS) if count <= ROWS_PER_FEATURE * width else (0, FOLDS)
    groups = torch.arange(count) if groups is None else groups.cpu()
    apart = int(groups.max()) + 1
    folds, final = (many if apart >= max(many, 3) else apart * (apart >= 3) for many in (folds, final))
    order = torch.randperm(apart, generator=torch.Generator().manual_seed(seed))
    fold, final_fold = (
        (torch.arange(apart) % max(many, 1))[order][groups].to(y.device) for many in (folds, final)
    )
    if float(y.min()) == float(y.max()):
        return _flat(y, width, strengths[0], final_fold, final)
    everything: _Problem
    everything = _Dual(features, mean, y) if count <= width else _Primal(features, mean, y)

    left_out = y - y.median() if residuals is None else residuals.double()
    weights = _weights(left_out)
    candidates: list[_Candidate] = []
    for strength in strengths:
        penalty = _Penalty.of(strength * everything.largest, noise, count)
        weights, left_out = _settle(everything.under(penalty), weights)
        if folds:
            left_out, _ = _by_fold(everything, y, fold, penalty, weights)
        candidates.append(_Candidate(strength, weights, left_out))

    chosen = max(candidates, key=lambda candidate: float(_log_likelihood(candidate.left_out).mean()))
    penalty = _Penalty.of(chosen.strength * everything.largest, noise, count)
    slope, intercept = everything.under(penalty).line(chosen.weights)
    left_out, fold_slopes, shifts = chosen.left_out, y.new_empty(0, width), y.new_empty(0)
    if final:
        left_out, lines = _by_fold(everything, y, final_fold, penalty, chosen.weights)
        fold_slopes, shifts = (torch.stack(column) for column in zip(*lines, strict=True))
    return CauchyRegression(
        slope=slope,
        intercept=float(intercept - mean @ slope),
        scale=cauchy_scale(left_out),
        left_out=left_out,
        weights=chosen.weights,
        strength=chosen.strength,
        ridge=float(penalty.ridge),
        log_likelihood=float(_log_likelihood(left_out).mean()),
        fold=final_fold if final else final_fold[:0],
        fold_slopes=fold_slopes,
        fold_intercepts=shifts - fold_slopes @ mean,
    )


def cauchy_scale(residuals: Tensor) -> float:
    """The β that makes residuals (N,) likeliest as Cauchy(0, β): mean(1/(1 + e²/β²)) = ½.

    Where half of them are 0 there is none; it is then next to nothing beside the largest.
    """
    largest = max(float(residuals.abs().max()), torch.finfo(torch.float64).tiny)
    ratios = residuals.double() / largest
    low, high = math.log(NARROWEST), 1.0  # of log(β/largest): the mean grows with β, and at e it is above ½
    for _ in range(50):
        middle = (low + high) / 2
        if float((1 / (1 + (ratios * math.exp(-middle)).square())).mean()) < 0.5:
            low = middle
        else:
            high = middle
    return largest * math.exp((low + high) / 2)


class _Candidate(NamedTuple):
    strength: float
    weights: Tensor
    left_out: Tensor


class _Penalty(NamedTuple):
    """wᵀ(ridge·1 + noise)w."""

    ridge: Tensor  # scalar
    noise: Tensor | None  # (H, H), N times the second moment of the error

    @classmethod
    def of(cls, ridge: Tensor, noise: Tensor | None, count: int) -> _Penalty:
        return cls(ridge, None if noise is None else count * noise.to(ridge))

    def add_to(self, matrix: Tensor) -> Tensor:
        """(H, H) matrix + ridge + noise, in place."""
        matrix.diagonal().add_(self.ridge)
        return matrix if self.noise is None else matrix.add_(self.noise)

    def divide(self, x: Tensor) -> Tensor:
        """(N, H) x (ridge + noise)⁻¹."""
        if self.noise is None:
            return x / self.ridge
        factor = torch.linalg.cholesky(self.add_to(torch.zeros_like(self.noise)))
        return torch.cholesky_solve(x.T, factor).T


class _Solver(Protocol):
    """A ridge regression of one strength, for any weights."""

    def left_out(self, weights: Tensor) -> Tensor:
        """(N,) residual of each row by the fit to all others with these weights."""

    def line(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Slope (H,), and intercept where features are centred at their mean."""


class _Problem(Protocol):
    """Rows to be fitted."""

    largest: Tensor  # eigenvalue of the features' scatter

    def without(self, rows: Tensor) -> _Problem:
        """The rows but those marked (N,)."""

    def under(self, penalty: _Penalty) -> _Solver:
        """The regression with a penalty."""

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        """Of a line, at the rows marked (N,)."""


class _Dual:
    """(K + diag(1/ω))·α + b = y with Σα = 0 and K = X A⁻¹ Xᵀ of the penalty A; the slope is A⁻¹Xᵀα.

    A left-out residual is α_i over the i-th diagonal entry of the inverse of the bordered matrix.
    """

    def __init__(self, features: Tensor, mean: Tensor, y: Tensor) -> None:
        self.x, self.y = features.double() - mean, y
        eigenvalues = torch.linalg.eigvalsh(self.x @ self.x.T)
        self.largest = eigenvalues[-1].clamp(min=torch.finfo(y.dtype).tiny)
        self._kept: tuple[_Penalty, Tensor, Tensor] | None = None

    def without(self, rows: Tensor) -> _Problem:
        return _DualPart(self, ~rows)

    def under(self, penalty: _Penalty) -> _Solver:
        divided, gram = self.divided(penalty)
        return _DualSolver(divided, gram, self.y)

    def divided(self, penalty: _Penalty) -> tuple[Tensor, Tensor]:
        """X A⁻¹ and K, kept for the parts."""
        if self._kept is None or self._kept[0] is not penalty:
            divided = penalty.divide(self.x)
            self._kept = penalty, divided, divided @ self.x.T
        return self._kept[1:]

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        return self.y[rows] - self.x[rows] @ slope - intercept


class _DualPart:
    """Some of the rows, with the matrices of all."""

    def __init__(self, whole: _Dual, kept: Tensor) -> None:
        self.whole, self.kept, self.largest = whole, kept, whole.largest

    def without(self, rows: Tensor) -> _Problem:
        raise NotImplementedError("a fold has no folds")

    def under(self, penalty: _Penalty) -> _Solver:
        divided, gram = self.whole.divided(penalty)
        return _DualSolver(divided[self.kept], gram[self.kept][:, self.kept], self.whole.y[self.kept])

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        return self.whole.residuals(slope, intercept, rows)


class _DualSolver:
    def __init__(self, divided: Tensor, gram: Tensor, y: Tensor) -> None:
        self.divided, self.gram, self.y = divided, gram, y

    def left_out(self, weights: Tensor) -> Tensor:
        alpha, _, diagonal = self._solve(weights)
        return alpha / diagonal

    def line(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        alpha, intercept, _ = self._solve(weights)
        return self.divided.T @ alpha, intercept

    def _solve(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix = self.gram.clone()
        matrix.diagonal().add_(1 / weights)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        ones = inverse.sum(1)  # (N,)
        solved = inverse @ self.y
        intercept = solved.sum() / ones.sum()
        return solved - ones * intercept, intercept, inverse.diagonal() - ones.square() / ones.sum()


class _Primal:
    """(Σ ω (x − x̄)(x − x̄)ᵀ + A)·w = Σ ω (x − x̄)(y − ȳ), with weighted means x̄ and ȳ.

    A left-out residual is the residual over 1 − leverage. Two passes over the features, in blocks.
    """

    def __init__(self, features: Tensor, mean: Tensor, y: Tensor, kept: Tensor | None = None) -> None:
        self.features, self.mean, self.y = features, mean, y
        self.kept = torch.ones_like(y, dtype=torch.bool) if kept is None else kept
        if kept is None:
            moment, *_ = self.moments(torch.ones_like(y))
            self.largest = torch.linalg.eigvalsh(moment)[-1].clamp(min=torch.finfo(y.dtype).tiny)

    def without(self, rows: Tensor) -> _Problem:
        part = _Primal(self.features, self.mean, self.y, ~rows)
        part.largest = self.largest
        return part

    def under(self, penalty: _Penalty) -> _Solver:
        return _PrimalSolver(self, penalty)

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        parts = [self.y[place] - x @ slope - intercept for place, x in self.blocks(rows)]
        return torch.cat(parts)

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted scatter of x (H, H), of x with y (H,), and their means; a weight for each row kept."""
        width = self.features.shape[1]
        moment, cross, x_sum = (self.y.new_zeros(*size) for size in ((width, width), (width,), (width,)))
        y, first = self.y[self.kept], 0
        for _, x in self.blocks(self.kept):
            rows = slice(first, first + len(x))
            weighted = x * weights[rows, None]
            moment += weighted.T @ x
            cross += weighted.T @ y[rows]
            x_sum += weighted.sum(0)
            first += len(x)
        total = weights.sum()
        x_mean, y_mean = x_sum / total, weights @ y / total
        return moment - total * x_mean.outer(x_mean), cross - total * y_mean * x_mean, x_mean, y_mean

    def blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices of the rows marked (N,), and their centred features."""
        for first in range(0, len(self.y), BLOCK):
            inside = rows[first : first + BLOCK]
            x = self.features[first : first + BLOCK].double()[inside] - self.mean
            yield first + inside.nonzero().squeeze(-1), x


class _PrimalSolver:
    def __init__(self, problem: _Primal, penalty: _Penalty) -> None:
        self.problem, self.penalty = problem, penalty

    def left_out(self, weights: Tensor) -> Tensor:
        inverse, slope, x_mean, y_mean = self._solve(weights)
        parts, first = [], 0
        for place, x in self.problem.blocks(self.problem.kept):
            own = weights[first : first + len(x)]
            centred = x - x_mean
            residual = self.problem.y[place] - y_mean - centred @ slope
            leverage = own * (1 / weights.sum() + (centred @ inverse * centred).sum(1))
            parts.append(residual / (1 - leverage).clamp(min=torch.finfo(residual.dtype).eps))
            first += len(x)
        return torch.cat(parts)

    def line(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        _, slope, x_mean, y_mean = self._solve(weights)
        return slope, y_mean - x_mean @ slope

    def _solve(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moment, cross, x_mean, y_mean = self.problem.moments(weights)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.penalty.add_to(moment)))  # (H, H)
        return inverse, inverse @ cross, x_mean, y_mean


def _by_fold(
    everything: _Problem, y: Tensor, fold: Tensor, penalty: _Penalty, weights: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Each row's residual by the fit without its fold (N,), and the lines of these fits."""
    left_out, lines = torch.empty_like(y), []
    for k in range(int(fold.max()) + 1):
        solver = everything.without(fold == k).under(penalty)
        lines.append(solver.line(_settle(solver, weights[fold != k])[0]))
        left_out[fold == k] = everything.residuals(*lines[-1], fold == k)
    return left_out, lines


def _settle(solver: _Solver, weights: Tensor) -> tuple[Tensor, Tensor]:
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


def _flat(y: Tensor, width: int, strength: float, fold: Tensor, folds: int) -> CauchyRegression:
    """The line through targets that are all equal."""
    return CauchyRegression(
        slope=y.new_zeros(width),
        intercept=float(y[0]),
        scale=0.0,
        left_out=torch.zeros_like(y),
        weights=torch.full_like(y, 2.0),
        strength=strength,
        ridge=0.0,
        log_likelihood=math.inf,
        fold=fold if folds else fold[:0],
        fold_slopes=y.new_zeros(folds, width),
        fold_intercepts=y[:1].expand(folds),
    )
