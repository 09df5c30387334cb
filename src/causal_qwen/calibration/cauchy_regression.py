"""Linear regression by maximum Cauchy likelihood: y ~ Cauchy(w·x + b, β), with a ridge on w.

A Cauchy is a normal law whose precision is itself random. Expectation–maximisation therefore alternates a
ridge regression with weights ω_i = 2/(1 + e_i²/β²) and the β that makes the residuals e likeliest: a label far
off the line weighs next to nothing, where squared error would bend the line to it.

e_i is the *left-out* residual, of row i by the fit to all others, in closed form. With fewer rows than
features every residual of the fit itself can be made small, wrong labels' too; those of left-out rows cannot.
The ridge is chosen by the likelihood of the same residuals.

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

# Ridges that are tried, strongest first, relative to the largest eigenvalue of the features' Gram matrix.
STRENGTHS = tuple(10.0 ** (-half / 2) for half in range(15))
MOST_ITERATIONS = 50
TOLERANCE = 1e-3  # of a weight, between 0 and 2
BLOCK = 8192  # rows of features that are read at a time
# β relative to the spread of the target: what is narrower is rounding.
NARROWEST = 1e-9


class CauchyRegression(NamedTuple):
    """y ~ Cauchy(slope·x + intercept, scale)."""

    slope: Tensor  # (H,) w
    intercept: float  # b, not penalised
    scale: float  # β of a new row
    left_out: Tensor  # (N,) e, each row's residual by the fit to all others
    weights: Tensor  # (N,) ω: 2 on the line, 0 far off it
    strength: float  # of the ridge, relative
    log_likelihood: float  # of a left-out row, mean


def cauchy_regression(
    features: Tensor, target: Tensor, *, strengths: Sequence[float] = STRENGTHS
) -> CauchyRegression:
    """w, b and β of the strongest ridge whose left-out likelihood is within a standard error of the best.

    Args:
        features: (N, H), any float dtype, in memory or mapped from a file. They are standardised for the
            ridge; the slope is of the features as they are.
        target: (N,).
        strengths: Ridges to choose from, strongest first, each started from the one before: the first line
            is nearly flat and cannot follow wrong labels.

    Raises:
        ValueError: If there are fewer than three rows, or one is not finite.
    """
    count = len(target)
    if count < 3:
        raise ValueError(f"{count} rows; a regression with left-out residuals needs at least 3")
    y = target.double()
    mean, deviation = _standardisation(features)
    if not (torch.isfinite(mean).all() and torch.isfinite(deviation).all() and torch.isfinite(y).all()):
        raise ValueError("a feature or a target is NaN or infinite; a regression needs finite numbers")
    if float(y.min()) == float(y.max()):  # a flat line through all of them
        nothing = y.new_zeros(features.shape[1])
        return CauchyRegression(
            nothing, float(y[0]), 0.0, torch.zeros_like(y), torch.full_like(y, 2.0), strengths[0], math.inf
        )
    problem: _Problem
    if count <= features.shape[1]:
        problem = _Dual((features.double() - mean) / deviation, y)
    else:
        problem = _Primal(features, mean, deviation, y)

    left_out = y - y.median()
    weights = _weights(left_out, cauchy_scale(left_out))
    path: list[
        tuple[float, Tensor, Tensor, Tensor]
    ] = []  # strength, left-out residuals, weights, likelihoods
    for strength in strengths:
        for _ in range(MOST_ITERATIONS):
            used = weights
            left_out = problem.left_out(used, strength)
            beta = cauchy_scale(left_out)
            weights = _weights(left_out, beta)
            if (weights - used).abs().max() < TOLERANCE:
                break
        path.append((strength, left_out, used, _log_likelihood(left_out, beta)))

    strength, left_out, used, likelihood = path[_strongest([entry[3] for entry in path])]
    slope, intercept = problem.line(used, strength)
    slope = slope / deviation
    return CauchyRegression(
        slope=slope,
        intercept=float(intercept - mean @ slope),
        scale=cauchy_scale(left_out),
        left_out=left_out,
        weights=used,
        strength=strength,
        log_likelihood=float(likelihood.mean()),
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


class _Problem(Protocol):
    """A ridge regression with weights, of standardised features."""

    def left_out(self, weights: Tensor, strength: float) -> Tensor:
        """(N,) residual of each row by the fit to all others."""

    def line(self, weights: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """Slope (H,) and intercept."""


class _Dual:
    """(K + λ·diag(1/ω))·α + b = y with Σα = 0; the slope is Σ α_i x_i.

    A left-out residual is α_i over the i-th diagonal entry of the inverse of the bordered matrix.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.gram = x @ x.T  # (N, N)
        self.largest = torch.linalg.eigvalsh(self.gram)[-1].clamp(min=torch.finfo(x.dtype).tiny)

    def left_out(self, weights: Tensor, strength: float) -> Tensor:
        alpha, _, diagonal = self._solve(weights, strength)
        return alpha / diagonal

    def line(self, weights: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        alpha, intercept, _ = self._solve(weights, strength)
        return self.x.T @ alpha, intercept

    def _solve(self, weights: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor]:
        matrix = self.gram.clone()
        matrix.diagonal().add_(strength * self.largest / weights)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        ones = inverse.sum(1)  # (N,)
        solved = inverse @ self.y
        intercept = solved.sum() / ones.sum()
        return solved - ones * intercept, intercept, inverse.diagonal() - ones.square() / ones.sum()


class _Primal:
    """(Σ ω (x − x̄)(x − x̄)ᵀ + λ)·w = Σ ω (x − x̄)(y − ȳ), with weighted means x̄ and ȳ.

    A left-out residual is the residual over 1 − leverage. Two passes over the features, in blocks.
    """

    def __init__(self, features: Tensor, mean: Tensor, deviation: Tensor, y: Tensor) -> None:
        self.features, self.mean, self.deviation, self.y = features, mean, deviation, y
        moment, *_ = self._moments(torch.ones_like(y))
        self.largest = torch.linalg.eigvalsh(moment)[-1].clamp(min=torch.finfo(y.dtype).tiny)

    def left_out(self, weights: Tensor, strength: float) -> Tensor:
        inverse, slope, x_mean, y_mean = self._solve(weights, strength)
        parts = []
        for rows, x in self._blocks():
            centred = x - x_mean
            residual = self.y[rows] - y_mean - centred @ slope
            leverage = weights[rows] * (1 / weights.sum() + (centred @ inverse * centred).sum(1))
            parts.append(residual / (1 - leverage))
        return torch.cat(parts)

    def line(self, weights: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        _, slope, x_mean, y_mean = self._solve(weights, strength)
        return slope, y_mean - x_mean @ slope

    def _solve(self, weights: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moment, cross, x_mean, y_mean = self._moments(weights)
        moment.diagonal().add_(strength * self.largest)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))  # (H, H)
        return inverse, inverse @ cross, x_mean, y_mean

    def _moments(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted scatter of x (H, H), of x with y (H,), and their means."""
        width = self.features.shape[1]
        moment, cross, x_sum = (self.y.new_zeros(*size) for size in ((width, width), (width,), (width,)))
        for rows, x in self._blocks():
            weighted = x * weights[rows, None]
            moment += weighted.T @ x
            cross += weighted.T @ self.y[rows]
            x_sum += weighted.sum(0)
        total = weights.sum()
        x_mean, y_mean = x_sum / total, weights @ self.y / total
        return moment - total * x_mean.outer(x_mean), cross - total * y_mean * x_mean, x_mean, y_mean

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their standardised features."""
        for first in range(0, len(self.y), BLOCK):
            rows = slice(first, first + BLOCK)
            yield rows, (self.features[rows].double() - self.mean) / self.deviation


def _standardisation(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (H,) of the columns, 1 where a column is constant."""
    blocks = features.split(BLOCK)
    mean = torch.stack([block.double().sum(0) for block in blocks]).sum(0) / len(features)
    squares = torch.stack([(block.double() - mean).square().sum(0) for block in blocks]).sum(0)
    deviation = (squares / len(features)).sqrt()
    return mean, torch.where(deviation > NARROWEST * mean.abs(), deviation, 1.0)


def _weights(residuals: Tensor, beta: float) -> Tensor:
    return 2 / (1 + (residuals / beta).square())


def _log_likelihood(residuals: Tensor, beta: float) -> Tensor:
    return -math.log(math.pi * beta) - (residuals / beta).square().log1p()


def _strongest(likelihoods: list[Tensor]) -> int:
    """The first of the (N,) log-likelihoods that is not below the best by more than the standard error of
    their difference.
    """
    best = max(likelihoods, key=lambda likelihood: float(likelihood.mean()))
    for index, likelihood in enumerate(likelihoods):
        lost = best - likelihood
        if float(lost.mean()) <= float(lost.std()) / math.sqrt(len(lost)):
            return index
    raise AssertionError("the best loses nothing against itself")
