"""The number that would come next."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["NumberPrediction"]


@dataclass(frozen=True)
class NumberPrediction:
    """The number that would come next, one per row, in float64.

    Args:
        median: (B,) point prediction.
        lower: (B,) lower end of the interval.
        upper: (B,) upper end of the interval.
        prob_num: (B,) P_<NUM>, that the next token is a number at all.
        level: Probability of the interval.
        extrapolates: (B,) whether it lies beyond what training has seen, by the leverage of its features or
            the range of the values; its interval is then the law's, widened, not the calibrated one. None
            where nobody knows.
    """

    median: Tensor
    lower: Tensor
    upper: Tensor
    prob_num: Tensor
    level: float
    extrapolates: Tensor | None = None
