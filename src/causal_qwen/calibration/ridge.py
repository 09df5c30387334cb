"""Weighted ridge regressions: left-out residuals in closed form, and the line, for any weights of the rows.

Few rows are solved in the dual (N × N), many in the primal (H × H), which reads the features in blocks: they
may be mapped from a file. All in float64. This module does not know where weights come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["BLOCK", "Penalty", "Problem", "Solver", "problem_of"]

BLOCK = 8192  # rows of features that are read at a time
# Up to so many rows per feature inverting (N, N) takes less than summing and inverting (H, H).
DUAL_ROWS_PER_FEATURE = 2


class Penalty(NamedTuple):
    """wᵀ(ridge·1 + noise)w."""

    ridge: Tensor  # scalar
    noise: Tensor | None  # (H, H), N times the second moment of the error

    @classmethod
    def of(cls, ridge: Tensor, noise: Tensor | None, count: int) -> Penalty:
        """Of a ridge, and of the second moment (H, H) of an error in the features of ``count`` rows."""
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


class Solver(Protocol):
    """A ridge regression of one strength, for any weights."""

    def left_out(self, weights: Tensor) -> Tensor:
        """(N,) residual of each row by the fit to all others with these weights."""

    def line(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Slope (H,), and intercept where features are centred at their mean."""


class Problem(Protocol):
    """Rows to be fitted."""

    largest: Tensor  # eigenvalue of the features' scatter
    width: int  # H

    def without(self, rows: Tensor) -> Problem:
        """The rows but those marked (N,)."""

    def under(self, penalty: Penalty) -> Solver:
        """The regression with a penalty."""

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        """Of a line, at the rows marked (N,)."""


def problem_of(features: Tensor, mean: Tensor, y: Tensor) -> Problem:
    """In the dual up to two rows per feature, then in the primal.

    Args:
        features: (N, H).
        mean: (H,) of the features, which are centred at it.
        y: (N,) targets, float64.
    """
    is_dual = len(y) <= DUAL_ROWS_PER_FEATURE * features.shape[1]
    return _Dual(features, mean, y) if is_dual else _Primal(features, mean, y)


class _Dual:
    """(K + diag(1/ω))·α + b = y with Σα = 0 and K = X A⁻¹ Xᵀ of the penalty A; the slope is A⁻¹Xᵀα.

    A left-out residual is α_i over the i-th diagonal entry of the inverse of the bordered matrix.
    """

    def __init__(self, features: Tensor, mean: Tensor, y: Tensor) -> None:
        self.x, self.y, self.width = features.double() - mean, y, features.shape[1]
        eigenvalues = torch.linalg.eigvalsh(self.x @ self.x.T)
        self.largest = eigenvalues[-1].clamp(min=torch.finfo(y.dtype).tiny)
        self._kept: tuple[Penalty, Tensor, Tensor] | None = None

    def without(self, rows: Tensor) -> Problem:
        return _DualPart(self, ~rows)

    def under(self, penalty: Penalty) -> Solver:
        divided, gram = self.divided(penalty)
        return _DualSolver(divided, gram, self.y)

    def divided(self, penalty: Penalty) -> tuple[Tensor, Tensor]:
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
        self.whole, self.kept, self.largest, self.width = whole, kept, whole.largest, whole.width

    def without(self, rows: Tensor) -> Problem:
        return _DualPart(self.whole, self.kept & ~rows)

    def under(self, penalty: Penalty) -> Solver:
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
        self.features, self.mean, self.y, self.width = features, mean, y, features.shape[1]
        self.kept = torch.ones_like(y, dtype=torch.bool) if kept is None else kept
        if kept is None:
            moment, *_ = self.moments(torch.ones_like(y))
            self.largest = torch.linalg.eigvalsh(moment)[-1].clamp(min=torch.finfo(y.dtype).tiny)

    def without(self, rows: Tensor) -> Problem:
        part = _Primal(self.features, self.mean, self.y, self.kept & ~rows)
        part.largest = self.largest
        return part

    def under(self, penalty: Penalty) -> Solver:
        return _PrimalSolver(self, penalty)

    def residuals(self, slope: Tensor, intercept: Tensor, rows: Tensor) -> Tensor:
        parts = [self.y[place] - x @ slope - intercept for place, x in self.blocks(rows)]
        return torch.cat(parts)

    def moments(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted scatter of x (H, H), of x with y (H,), and their means; a weight for each row kept."""
        sizes = (self.width, self.width), (self.width,), (self.width,)
        moment, cross, x_sum = (self.y.new_zeros(*size) for size in sizes)
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
    def __init__(self, problem: _Primal, penalty: Penalty) -> None:
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
