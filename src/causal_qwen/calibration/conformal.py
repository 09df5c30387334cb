"""Conformal calibration: intervals that cover what they say, whatever the law of the numbers.

Numbers that training did not use give standardised residuals |g(v) − loc_Y|/scale_Y. If they and a new
number are exchangeable, the ⌈(n + 1)·level⌉-th smallest of n residuals bounds the new one with probability at
least ``level``, and at most level + 1/(n + 1) where no two are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM

__all__ = ["FEWEST_SCORES", "MOST_SCORES", "fit_conformal", "keep_scores", "standardised_residuals"]

logger = logging.getLogger(__name__)

# With n scores the highest level that they speak for is n/(n + 1): 0.95 with 19.
FEWEST_SCORES = 20
# Levels up to 0.999, in a configuration that a person can still open.
MOST_SCORES = 999


def fit_conformal(model: CausalLM, batches: Iterable[Mapping[str, Any]], *, seed: int = 0) -> None:
    """Set ``model.config.conformal_scores`` from numbers that training did not use.

    With fewer than 20 numbers the field becomes None, which is logged: intervals are then the Cauchy law's.

    Args:
        model: A trained model.
        batches: As for `evaluate`; a score per position whose label is <NUM>.
        seed: Of the random subsample that is kept where there are more than 999 scores.

    Raises:
        ValueError: If the model has no number channel, or a residual is NaN.
    """
    num_token_id = model.config.num_token_id
    if num_token_id is None:
        raise ValueError("this model has no <NUM> token, so no intervals; `convert` its base first")
    residuals = []
    for positions in labelled_positions(model, batches):
        numbers = positions.at(positions.labels == num_token_id)
        target = model.value_space.encode(numbers.values)
        residuals.append(standardised_residuals(numbers.Y, target).cpu())
    scores = torch.cat(residuals) if residuals else torch.empty(0)
    config = model.config
    config.conformal_scores, config.conformal_folds = keep_scores(scores, seed=seed)[0], None


def standardised_residuals(Y: Cauchy, target: Tensor) -> Tensor:
    """|target − loc_Y|/scale_Y in float64.

    Args:
        Y: (M,) laws in value space.
        target: (M,) g(v), standardised.
    """
    return (target.double() - Y.loc.double()).abs() / Y.scale.double()


def keep_scores(
    scores: Tensor, folds: Tensor | None = None, *, seed: int = 0
) -> tuple[list[float] | None, list[int] | None]:
    """Sorted scores, at most 999 of them: a random subsample of exchangeable scores is exchangeable.

    Args:
        scores: (M,) standardised residuals.
        folds: (M,) the fold of each; None or none for numbers set aside.
        seed: Of the subsample.

    Returns:
        The scores and their folds; None where there are fewer than 20 scores, with a warning in the log, and
        None where there are no folds.

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
        return None, None
    if len(scores) > MOST_SCORES:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randperm(len(scores), generator=generator)[:MOST_SCORES]
        scores, folds = scores[kept], folds if folds is None or len(folds) == 0 else folds[kept]
    largest = torch.finfo(torch.float64).max  # JSON has no infinity
    ordered, order = scores.double().clamp(max=largest).sort()
    return ordered.tolist(), None if folds is None or len(folds) == 0 else folds[order].tolist()
