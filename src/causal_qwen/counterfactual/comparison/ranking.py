"""More than two: every pair of them on the same individuals, and whether the rankings agree.

By mean score there is always one order. By how often one scores higher than another on the same pair there
need not be: A may beat B more often than not, B beat C, and C beat A. This module knows numbers alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from causal_qwen.counterfactual.comparison.statistics import Estimate, Matrix, estimate

__all__ = ["Ranking", "rank"]


@dataclass(frozen=True)
class Ranking:
    """Several sides in order.

    Args:
        by_mean: Names, the largest mean score first.
        by_wins: Names, the one that beats most others first.
        pairwise: Estimate of (one, other) for every two of them, in the order of ``by_mean``.
        wins: Of the same two: share of pairs in which the first scores higher, and the second.
        cycle: Three names of whom each beats the next, and the last the first; None if there are none.
    """

    by_mean: tuple[str, ...]
    by_wins: tuple[str, ...]
    pairwise: Mapping[tuple[str, str], Estimate]
    wins: Mapping[tuple[str, str], tuple[float, float]]
    cycle: tuple[str, str, str] | None

    @property
    def agree(self) -> bool:
        """Whether both orders are the same, and nobody is beaten in a circle."""
        return self.cycle is None and self.by_mean == self.by_wins

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "by_mean": list(self.by_mean),
            "by_wins": list(self.by_wins),
            "agree": self.agree,
            "cycle": None if self.cycle is None else list(self.cycle),
            "pairwise": [
                {"a": one, "b": other, "wins_a": self.wins[one, other][0], "wins_b": self.wins[one, other][1]}
                | found.to_dict()
                for (one, other), found in self.pairwise.items()
            ],
        }


def rank(scores: Mapping[str, Matrix], *, level: float = 0.95, crossed: bool = False) -> Ranking:
    """Every two of several sides, by scores (individuals, prompts) of the same individuals; NaN is missing.

    Args:
        scores: By the name of the side.
        level: Of all intervals.
        crossed: Whether the same individuals answer every prompt.

    Raises:
        ValueError: If there are fewer than two.
    """
    if len(scores) < 2:
        raise ValueError(f"{len(scores)} sides; a ranking needs at least 2")
    there = {name: found[np.isfinite(found)] for name, found in scores.items()}
    means = {name: float(found.mean()) if found.size else -math.inf for name, found in there.items()}
    by_mean = tuple(sorted(scores, key=lambda name: -means[name]))
    pairwise, wins, beats = {}, {}, set()
    for one, other in itertools.combinations(by_mean, 2):
        both = np.isfinite(scores[one]) & np.isfinite(scores[other])
        ours, theirs = scores[one][both], scores[other][both]
        count = max(int(both.sum()), 1)
        wins[one, other] = (float((ours > theirs).sum() / count), float((theirs > ours).sum() / count))
        pairwise[one, other] = estimate(
            scores[one], scores[other], seen=both.size, level=level, crossed=crossed
        )
        if wins[one, other][0] != wins[one, other][1]:
            beats.add((one, other) if wins[one, other][0] > wins[one, other][1] else (other, one))
    beaten = {name: sum(winner == name for winner, _ in beats) for name in by_mean}
    by_wins = tuple(sorted(by_mean, key=lambda name: -beaten[name]))
    circles = (
        trio for trio in itertools.permutations(by_mean, 3)
        if {(trio[0], trio[1]), (trio[1], trio[2]), (trio[2], trio[0])} <= beats
    )  # fmt: skip
    return Ranking(by_mean, by_wins, pairwise, wins, next(circles, None))
