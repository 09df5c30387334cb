"""Conformal calibration: intervals that cover what they say, whatever the law of the numbers.

Numbers that training did not use give standardised residuals |g(v) − loc_Y|/scale_Y. If they and a new
number are exchangeable, the ⌈(n + 1)·level⌉-th smallest of n residuals bounds the new one with probability at
least ``level``, and at most level + 1/(n + 1) where no two are equal.

That holds on the whole, not for large or for small numbers by themselves. Groups (Mondrian) divide them by
the predicted loc_Y, and each group has the residuals of its own: what is said then holds in every group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM
from causal_qwen.intervals import LARGEST_SHIFT, give_up_where_moved

__all__ = [
    "FEWEST_SCORES",
    "LARGEST_SHIFT",
    "MOST_SCORES",
    "Scores",
    "fit_conformal",
    "give_up_where_moved",
    "keep_scores",
    "standardised_residuals",
]

logger = logging.getLogger(__name__)

# With n scores the highest level that they speak for is n/(n + 1): 0.95 with 19.
FEWEST_SCORES = 20
# Levels up to 0.999, in a configuration that a person can still open.
MOST_SCORES = 999


class Scores(NamedTuple):
    """What a configuration keeps of residuals, under ``conformal_…``; None where there is none."""

    scores: list[float] | None = None
    folds: list[int] | None = None
    edges: list[float] | None = None
    groups: list[int] | None = None

    @classmethod
    def kept_in(cls, config: Any) -> Scores:
        """What a configuration keeps."""
        return cls(*(getattr(config, f"conformal_{name}") for name in cls._fields))

    def keep_in(self, config: Any) -> None:
        """Set the four fields."""
        for name, column in self._asdict().items():
            setattr(config, f"conformal_{name}", column)


def fit_conformal(
    model: CausalLM, batches: Iterable[Mapping[str, Any]], *, groups: int = 1, seed: int = 0
) -> None:
    """Set ``model.config.conformal_scores`` from numbers that training did not use.

    With fewer than 20 numbers the field becomes None, which is logged: intervals are then the Cauchy law's.

    Args:
        model: A trained model.
        batches: As for `evaluate`; a score per position whose label is <NUM>.
        groups: Of intervals with scores of their own, as for `keep_scores`.
        seed: Of the random subsample that is kept where there are more than 999 scores.

    Raises:
        ValueError: If the model has no number channel, or a residual is NaN.
    """
    num_token_id = model.config.num_token_id
    if num_token_id is None:
        raise ValueError("this model has no <NUM> token, so no intervals; `convert` its base first")
    residuals, locs = [], []
    for positions in labelled_positions(model, batches):
        numbers = positions.at(positions.labels == num_token_id)
        target = model.value_space.encode(numbers.values)
        residuals.append(standardised_residuals(numbers.Y, target).cpu())
        locs.append(numbers.Y.loc.double().cpu())
    if not residuals:
        residuals, locs = [torch.empty(0)], [torch.empty(0)]
    kept = keep_scores(torch.cat(residuals), locs=torch.cat(locs), groups=groups, seed=seed)
    kept.keep_in(model.config)


def standardised_residuals(Y: Cauchy, target: Tensor) -> Tensor:
    """|target − loc_Y|/scale_Y in float64.

    Args:
        Y: (M,) laws in value space.
        target: (M,) g(v), standardised.
    """
    return (target.double() - Y.loc.double()).abs() / Y.scale.double()


def keep_scores(
    scores: Tensor,
    folds: Tensor | None = None,
    *,
    locs: Tensor | None = None,
    groups: int = 1,
    seed: int = 0,
) -> Scores:
    """Sorted scores, at most 999 of them: a random subsample of exchangeable scores is exchangeable.

    Args:
        scores: (M,) standardised residuals.
        folds: (M,) the fold of each; None or none for numbers set aside.
        locs: (M,) the loc_Y of each, predicted without its label; for groups.
        groups: As many as have 20 scores each, of equal size by loc_Y.
        seed: Of the subsample.

    Returns:
        All None where there are fewer than 20 scores, with a warning in the log.

    Raises:
        ValueError: If a score is NaN.
    """
    if scores.isnan().any():
        raise ValueError(
            f"residual {int(scores.isnan().nonzero()[0])} is NaN; the model predicts no number there, "
            "so no interval can be calibrated"
        )
    if len(scores) < FEWEST_SCORES:
        logger.warning(
            "%d numbers for calibration, fewer than %d: intervals stay the quantiles of the Cauchy law",
            len(scores),
            FEWEST_SCORES,
        )
        return Scores()
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(len(scores))
    if len(scores) > MOST_SCORES:
        kept = torch.randperm(len(scores), generator=generator)[:MOST_SCORES]
    kept = kept[scores[kept].argsort()]
    largest = torch.finfo(torch.float64).max  # JSON has no infinity
    ordered = scores[kept].double().clamp(max=largest).tolist()
    by_fold = None if folds is None or len(folds) == 0 else folds[kept].tolist()
    if groups == 1 or locs is None:
        return Scores(ordered, by_fold)
    edges = _edges(locs[kept].double(), groups)
    if not edges:
        return Scores(ordered, by_fold)
    return Scores(ordered, by_fold, edges, torch.bucketize(locs[kept].double(), torch.tensor(edges)).tolist())


def _edges(locs: Tensor, groups: int) -> list[float]:
    """Quantiles of loc_Y that divide it into as many groups as have 20 each, up to ``groups``."""
    for count in range(min(groups, len(locs) // FEWEST_SCORES), 1, -1):
        shares = torch.arange(1, count, dtype=locs.dtype) / count
        edges = locs.quantile(shares)
        if torch.bucketize(locs, edges).bincount(minlength=count).min() >= FEWEST_SCORES:
            if count < groups:
                logger.warning("%d numbers make %d groups of intervals, not %d", len(locs), count, groups)
            return edges.tolist()
    logger.warning("%d numbers are too few for %d groups of intervals: there is one", len(locs), groups)
    return []
