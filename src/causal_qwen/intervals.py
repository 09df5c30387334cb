"""Intervals of numbers: from a level to a multiple of scale_Y.

The law's own multiple is tan(π·level/2). A split-conformal map replaces it by a quantile of standardised
residuals r = |g(v) − loc_Y|/scale_Y that were set aside: whatever the law gets wrong, an interval
loc_Y ± multiple·scale_Y then covers a new, exchangeable number with at least the stated probability.

This module knows the Cauchy law; it does not know models, nor where residuals come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from causal_qwen.cauchy import Cauchy, central_multiple

__all__ = ["interval", "multiple"]

# (n + 1)·level is meant as a decimal number: 100·0.29 must not become 29.000000000000004 and then rank 30.
DIGITS = 9


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
    rank = math.ceil(round((len(scores) + 1) * level, DIGITS))
    return scores[max(rank, 1) - 1] if rank <= len(scores) else max(scores[-1], of_the_law)


def interval(Y: Cauchy, level: float, scores: Sequence[float] | None = None) -> tuple[Tensor, Tensor]:
    """loc_Y ∓ scale_Y·multiple(level, scores), in value space.

    Args:
        Y: The number's law, any shape.
        level: Probability of the interval, in (0, 1).
        scores: Standardised residuals, sorted; None for the law itself.
    """
    half_width = Y.scale * multiple(level, scores)
    return Y.loc - half_width, Y.loc + half_width
