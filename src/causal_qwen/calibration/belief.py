"""Which labels are believed: the law of right labels beside that of wrong ones.

A right label is Cauchy(0, β) about what its row predicts. A wrong one says nothing of its row: it is
Cauchy(μ, γ) whatever the row, the same law for all of them. A Cauchy law alone gives a wrong label little
weight, but it has to be wide to allow for them, and whatever is chosen by its likelihood allows for them too.
With a law of their own they are told apart: a label is believed where it is more probably right than wrong.

This module does not know features or lines.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Belief", "WrongLabels", "believe", "cauchy_scale"]

# β relative to the largest residual: what is narrower is rounding.
NARROWEST = 1e-9
# γ in units of β: a law that is hardly wider than that of right labels would be one of right labels.
NARROWEST_WRONG = 5.0
# Of labels that may be wrong: where most are, nobody can tell which.
LARGEST_SHARE = 0.5
MOST_ITERATIONS = 300
TOLERANCE = 1e-4  # of a probability


class WrongLabels(NamedTuple):
    """Their law, y ~ Cauchy(center, scale) whatever the row, and their share among all labels."""

    share: float
    center: float
    scale: float

    def right(self, residuals: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        """(N,) probability that a label is right, by Bayes' rule.

        Args:
            residuals: (N,) of the labels.
            target: (N,) the labels.
            scale: (N,) or scalar, β of right ones.
        """
        right, wrong = self._log_densities(residuals, target, scale)
        return torch.sigmoid(right - wrong)

    def log_likelihood(self, residuals: Tensor, target: Tensor, scale: float) -> float:
        """Of all labels (N,), right or wrong."""
        return float(
            torch.logaddexp(*self._log_densities(residuals, target, residuals.new_tensor(scale))).sum()
        )

    def _log_densities(self, residuals: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        wrong = _log_density(target - self.center, target.new_tensor(self.scale))
        return math.log1p(-self.share) + _log_density(residuals, scale), math.log(self.share) + wrong


class Belief(NamedTuple):
    """What residuals say about their labels."""

    right: Tensor  # (N,) probability that a label is right
    scale: float  # β of right labels
    wrong: WrongLabels | None  # None where no label is more probably wrong than right

    @property
    def believed(self) -> Tensor:
        """(N,) whether a label is at least as probably right as wrong."""
        return self.right >= 0.5


def believe(residuals: Tensor, target: Tensor) -> Belief:
    """The likeliest two laws and share of wrong labels, by expectation–maximisation.

    Args:
        residuals: (N,) of labels that the line has not been fitted to: a line can follow a wrong label.
        target: (N,) the labels.

    Returns:
        Every label right, and the β of all, unless two laws are likelier than one by 3/2·ln N, which their
        three parameters have to earn (Schwarz' criterion); also where at least half would be wrong.
    """
    e, y = residuals.double(), target.double()
    scale = cauchy_scale(e)
    everything = Belief(torch.ones_like(e), scale, None)
    right = 1 / (1 + (e / (NARROWEST_WRONG * scale)).square())
    wrong = None
    for _ in range(MOST_ITERATIONS):
        doubt = 1 - right  # (N,)
        if float(doubt.sum()) < 0.5:  # then no single one is above ½
            return everything
        if wrong is None:
            center = _weighted_median(y, doubt)
            wide = cauchy_scale(y - center, doubt)
        pull = doubt / (1 + ((y - center) / wide).square())
        center = float(pull @ y / pull.sum())
        wide = max(cauchy_scale(y - center, doubt), NARROWEST_WRONG * scale)
        wrong = WrongLabels(float(doubt.mean()), center, wide)
        before, right = right, wrong.right(e, y, e.new_tensor(scale))
        scale = cauchy_scale(e, right)
        if (right - before).abs().max() < TOLERANCE:
            break
    if wrong is None or wrong.share >= LARGEST_SHARE or bool((right >= 0.5).all()):
        return everything
    one_law = float(_log_density(e, e.new_tensor(everything.scale)).sum())
    if wrong.log_likelihood(e, y, scale) < one_law + 1.5 * math.log(len(e)):
        return everything
    return Belief(right, scale, wrong)


def cauchy_scale(residuals: Tensor, weights: Tensor | None = None) -> float:
    """The β that makes residuals (N,) likeliest as Cauchy(0, β): mean(1/(1 + e²/β²)) = ½.

    Where half of them are 0 there is none; it is then next to nothing beside the largest.

    Args:
        residuals: (N,).
        weights: (N,) ≥ 0, not all 0, of the mean; None weighs all alike.
    """
    largest = max(float(residuals.abs().max()), torch.finfo(torch.float64).tiny)
    squares = (residuals.double() / largest).square()
    share = torch.full_like(squares, 1 / len(squares)) if weights is None else weights / weights.sum()
    # Newton's steps in log(β/largest), kept between two ends: the mean grows with β, and at e it is above ½.
    low, high = math.log(NARROWEST), 1.0
    at = low / 4
    for _ in range(60):
        parts = 1 / (1 + squares * math.exp(-2 * at))
        excess, slope = float(share @ parts) - 0.5, 2 * float(share @ (parts * (1 - parts)))
        low, high = (at, high) if excess < 0 else (low, at)
        step = at - excess / slope if slope > 0 else math.inf
        before, at = at, step if low < step < high else (low + high) / 2
        if abs(at - before) < 1e-12:
            break
    return largest * math.exp(at)


def _log_density(residuals: Tensor, scale: Tensor) -> Tensor:
    """Of Cauchy(0, scale): log scale/(π·(scale² + e²)); no square that overflows."""
    return scale.log() - math.log(math.pi) - 2 * torch.hypot(residuals, scale).log()


def _weighted_median(values: Tensor, weights: Tensor) -> float:
    order = values.argsort()
    reached = weights[order].cumsum(0) >= weights.sum() / 2
    return float(values[order][reached.nonzero()[0, 0]])
