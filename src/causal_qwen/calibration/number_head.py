"""The number channel, before and after training: the value space, b_<NUM>, and w, b_Y and β_Y in closed form.

Conversion puts b_<NUM> so low that the token is never chosen, and knows no numbers. Here the features of some
training rows say where <NUM>, loc_Y and scale_Y should be. This module does not know how rows are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.positions import labelled_positions
from causal_qwen.calibration.regression import ridge
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM
from causal_qwen.heads import exact
from causal_qwen.value_space import ValueSpace

__all__ = ["refit_numbers", "set_value_space", "wake_numbers"]

logger = logging.getLogger(__name__)

MOST_NUMBERS = 1024  # numbers that the head is fitted to
FEWEST_NUMBERS = 16  # fewer say nothing about a slope
# Least scale_Y at the start, in units of value_spread: narrower than this, far numbers pull no more.
NARROWEST = 0.05
MARGIN = 1.0  # of <NUM> above its threshold, in nats, where every label is a number
SLACK = 0.1  # of the squared error, for a stronger penalty


def set_value_space(model: CausalLM, kind: Literal["log", "linear"], values: Tensor) -> None:
    """Center and spread of the numbers (N,) to be trained on; without numbers nothing changes."""
    if values.numel() == 0:
        logger.warning("the training rows hold no number to learn; only words are trained")
        return
    space = ValueSpace.fit(kind, values)
    model.config.value_space = space.kind
    model.config.value_center, model.config.value_spread = space.center, space.spread


@torch.no_grad()
def wake_numbers(
    model: CausalLM, batches: Iterable[Mapping[str, Any]], *, method: Literal["fit", "plain"]
) -> None:
    """Set b_<NUM>, w, b_Y and β_Y of a model that has never written numbers.

    "plain": b_<NUM> = 0, loc_Y = 0, scale_Y = 1. "fit": b_<NUM> puts the threshold midway between the scores
    of <NUM> at nine of ten positions before a number and at nine of ten other positions; loc_Y is the ridge
    regression of the numbers on loc_U; scale_Y is the median of its leave-one-out errors.

    Args:
        model: Changed in place.
        batches: Labelled training rows, of which the first with 1,024 numbers are used.
        method: "fit" or "plain"; "fit" is "plain" where there are fewer than 16 numbers.
    """
    action, row = model.action, model.config.num_token_id
    action.bias[row] = 0.0
    action.number.weight.zero_()
    action.number.bias.zero_()
    action.number_noise.fill_(1.0)
    if method == "plain":
        return
    numbers = _numbers(model, batches)
    if len(numbers.target) < FEWEST_NUMBERS:
        return
    low, rest = numbers.scores.quantile(0.1), numbers.other_scores
    action.bias[row] -= low - MARGIN if len(rest) == 0 else (low + rest.quantile(0.9)) / 2
    # A slope that is as small as it can be, since training moves the features under it.
    _solve_numbers(model, numbers, slack=SLACK)


@torch.no_grad()
def refit_numbers(model: CausalLM, batches: Iterable[Mapping[str, Any]]) -> bool:
    """Solve for w, b_Y and β_Y once more, on the features that training has made.

    With the features fixed, the number head is one linear regression, and gradients need many steps for what
    a solver does at once. Its leave-one-out error must be below the trained head's error on the same rows,
    which that head was trained on: otherwise nothing changes.

    Args:
        model: Changed in place.
        batches: Labelled training rows, of which the first with 1,024 numbers are used.

    Returns:
        Whether the head was exchanged.
    """
    numbers = _numbers(model, batches)
    if len(numbers.target) < FEWEST_NUMBERS:
        return False
    head = (model.action.number.weight, model.action.number.bias, model.action.number_noise)
    trained = [parameter.clone() for parameter in head]
    error_trained = (model.action.numbers(numbers.U).loc - numbers.target).abs().median()
    error_solved = _solve_numbers(model, numbers, slack=0.0)
    if error_solved is not None and error_solved < error_trained:
        return True
    for parameter, trained_value in zip(head, trained, strict=True):
        parameter.copy_(trained_value)
    return False


class _Numbers(NamedTuple):
    """Positions before a number: U' (N, D), g(v) (N,), the score of <NUM> there, and at other positions."""

    U: Cauchy
    target: Tensor
    scores: Tensor
    other_scores: Tensor


def _numbers(model: CausalLM, batches: Iterable[Mapping[str, Any]]) -> _Numbers:
    action, row = model.action, model.config.num_token_id
    parts: list[tuple[Tensor, ...]] = []
    for positions in labelled_positions(model, batches):
        is_num = positions.labels == row
        S = action.scores(positions.U_noisy, positions.U0, model.lm_head.weight, slice(row, row + 1))
        above = S.loc[:, 0] - exact(action.threshold[row])
        U, target = positions.U_noisy[is_num], model.value_space.encode(positions.values[is_num])
        parts.append((target, U.loc, U.scale, above[is_num], above[~is_num]))
        if sum(len(part[0]) for part in parts) >= MOST_NUMBERS:
            break
    columns = [torch.cat(column) for column in zip(*parts, strict=True)] or [torch.empty(0)] * 5
    target, loc, scale, scores, other_scores = columns
    return _Numbers(Cauchy(loc, scale), target, scores, other_scores)


def _solve_numbers(model: CausalLM, numbers: _Numbers, *, slack: float) -> float | None:
    """Set w and b_Y to the ridge regression of the numbers on loc_U, β_Y to its median leave-one-out error.

    That error is returned; None where all numbers are equal, and nothing was changed.
    """
    action, target = model.action, numbers.target
    if target.min() == target.max():
        return None
    fit = ridge(numbers.U.loc, target.to(numbers.U.loc.dtype), slack=slack)
    action.number.weight.copy_(fit.slope[None])
    action.number.bias.fill_(fit.intercept)
    action.number_noise.zero_()
    scale_of_causes = action.numbers(numbers.U).scale.median()
    error = (fit.left_out - target).abs().median().to(scale_of_causes.dtype)
    action.number_noise.copy_((error.clamp(min=NARROWEST) - scale_of_causes).clamp(min=0.1 * NARROWEST))
    logger.info("numbers: R² %.3f (leave-one-out), median error %.3f spreads", fit.r2, float(error))
    return float(error)
