"""Where <NUM>, and what ends a text behind it, are chosen: a token's row of W, b and C by the causes of rows.

Conversion puts b_<NUM> so low that the token is never chosen. The features before numbers, and those where
something else follows, say where it should be. This module does not know what the numbers are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from causal_qwen.calibration.number_head import (
    FEWEST_NUMBERS,
    MOST_ELSEWHERE,
    Batches,
    NumberData,
    evenly,
    features_of,
)
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM, shifted
from causal_qwen.heads import exact
from causal_qwen.losses import IGNORE_INDEX

__all__ = ["place_end_token", "place_num_token", "place_token"]

MARGIN = 3.0  # by which a token is to lead, in nats
RIDGE = 1e-3  # of the shift of its row, beside squared nats
# The same of running text: numbers come there among words, less surely, and the row may be how they are read.
TEXT_RIDGE = 0.05
SLACK = 0.1  # of the positions where a token is wanted, that may be on the wrong side of C beside what must
CHUNK = 128  # positions whose scores of all tokens are computed at a time


def place_num_token(
    model: CausalLM, data: NumberData, *, move_row: bool = True, among_words: bool = False
) -> bool:
    """`place_token` for <NUM>: chosen where a number follows, and in a table P_<NUM> large.

    Args:
        model: Changed in place.
        data: Of the training rows.
        move_row: As for `place_token`.
        among_words: Whether the rows are running text, in which a word comes far more often than a number.

    Returns:
        Whether its row has moved; with fewer than 16 numbers nothing changes.
    """
    if len(data.values) < FEWEST_NUMBERS:
        return False
    before = evenly(torch.arange(len(data.values), device=data.U.loc.device), MOST_ELSEWHERE)
    causes = (data.U[before], data.U0[before]), (data.U_elsewhere, data.U0_elsewhere)
    odds = data.words_per_number if among_words else None
    place_token(model, model.config.num_token_id, *causes, move_row=move_row, odds=odds)
    return move_row


@torch.no_grad()
def place_end_token(
    model: CausalLM, token: int, data: NumberData, batches: Batches, *, move_row: bool = True
) -> bool:
    """`place_token` for what ends a text: wanted behind numbers, not before them nor elsewhere.

    The causes behind numbers are inferred anew: how <NUM> is read may have changed.

    Returns:
        Whether its row has moved; with fewer than 16 ends nothing changes.
    """
    parts: list[Tensor] = []
    for batch in batches:
        inputs = {name: entry.to(model.device) for name, entry in batch.items() if isinstance(entry, Tensor)}
        is_num = inputs["input_ids"] == model.config.num_token_id
        ends = is_num & (shifted(inputs["labels"], IGNORE_INDEX) == token)
        parts.append(features_of(model, inputs)[ends])
    behind = torch.cat(parts)
    if len(behind) < FEWEST_NUMBERS:
        return False
    U, U0 = model.abduction(behind)
    before = evenly(torch.arange(len(data.values), device=U.loc.device), MOST_ELSEWHERE)
    U_rest = Cauchy.cat([data.U[before], data.U_elsewhere])
    U0_rest = Cauchy.cat([data.U0[before], data.U0_elsewhere])
    place_token(model, token, (model.action.exogenous(U), U0), (U_rest, U0_rest), move_row=move_row)
    return move_row


def place_token(
    model: CausalLM,
    token: int,
    wanted: tuple[Cauchy, Cauchy],
    unwanted: tuple[Cauchy, Cauchy],
    *,
    move_row: bool = True,
    odds: float | None = None,
) -> None:
    """Set a token's row of W, b and C so that it is chosen after some causes and not after others.

    The row moves as little as it can for the token to lead by three nats where it is wanted and to trail by
    as much where it is not (a squared hinge with a ridge). C is then put where the fewest positions have the
    wrong choice, or at most a tenth of the wanted ones more.

    Args:
        model: Changed in place.
        token: Its id.
        wanted: U' (N, D) and U₀ (N,).
        unwanted: U' (M, D) and U₀ (M,).
        move_row: Whether the row may change; tied to the embedding, it is also how the token is read.
        odds: In running text, how many positions where it is not wanted come on one where it is: what the two
            sides weigh. None weighs both the same, and P is to be on the right side of ½ too, as far as the
            choice allows it.
    """
    action, causes, ratio = model.action, (wanted, unwanted), odds or 1.0
    ridge = (RIDGE if odds is None else TEXT_RIDGE) if move_row else None
    with torch.no_grad():
        if token == model.config.num_token_id:
            action.bias[token] = 0.0
        rivals = [_rivals(model, token, *pair) for pair in causes]
        leads = [_leads(model, token, *pair, best).logit for pair, best in zip(causes, rivals, strict=True)]
    shift, bias = _separation([U.loc for U, _ in causes], leads, ridge=ridge, odds=ratio)
    with torch.no_grad():
        if move_row:
            model.lm_head.weight[token] += shift.to(model.lm_head.weight)
        action.bias[token] += bias
        needed, allowed = (
            _leads(model, token, *pair, best) for pair, best in zip(causes, rivals, strict=True)
        )
        # Raising C lowers both leads by as much. The choice comes first: running text moves all words above C
        # together, or below it, where no P tells them apart and the choice still does.
        lowest, highest = _cuts(needed.score, allowed.score, ratio)
        cut = (lowest + highest) / 2
        if odds is None:
            both = torch.minimum(needed.score, needed.threshold)
            either = torch.maximum(allowed.score, allowed.threshold)
            cut = min(max(sum(_cuts(both, either, ratio)) / 2, lowest), highest)
        action.threshold[token] += cut


def _separation(
    features: list[Tensor], leads: list[Tensor], *, ridge: float | None, odds: float
) -> tuple[Tensor, float]:
    """The smallest shift w (D,), and b, with which leads + w·x + b are 3 before numbers and −3 elsewhere.

    Args:
        features: (N, D) before numbers, and (M, D) elsewhere.
        leads: (N,) and (M,) without them.
        ridge: Of the shift; None allows none.
        odds: What the second side weighs, in units of the first; both weigh 2.
    """
    x, lead = torch.cat(features).double(), torch.cat(leads).double()
    side = torch.cat([torch.ones_like(leads[0]), -torch.ones_like(leads[1])]).double()
    share = 2 / (1 + odds)  # of the first side
    weight = torch.where(side > 0, share / len(leads[0]), (2 - share) / max(len(leads[1]), 1))
    size = x.square().mean().sqrt()
    parameters = torch.zeros(x.shape[1] + 1, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        moved = lead + parameters[-1] + (0.0 if ridge is None else x @ parameters[:-1] / size)
        cost = (weight * (MARGIN - side * moved).clamp(min=0).square()).sum()
        cost = cost + (ridge or 0.0) * parameters[:-1].square().sum()
        cost.backward()
        return cost

    with torch.enable_grad():
        optimizer.step(loss)
    solved = parameters.detach()
    return solved[:-1] / size, float(solved[-1])


class _Rivals(NamedTuple):
    """The best of all other tokens at n positions, (n,) each."""

    logit: Tensor  # loc_S
    z_score: Tensor  # (loc_S − C)/scale_S, by which is chosen


class _Leads(NamedTuple):
    """By how much a token leads at n positions, (n,) each, in nats."""

    logit: Tensor  # over the best other logit
    score: Tensor  # over the best other z-score, in units of its own scale
    threshold: Tensor  # over its own threshold


def _rivals(model: CausalLM, token: int, U: Cauchy, U0: Cauchy) -> _Rivals:
    action = model.action
    columns: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(U0.loc), CHUNK):
        part = slice(first, first + CHUNK)
        S = action.scores(U[part], U0[part], model.lm_head.weight, impl="fused")  # (n, V)
        S.loc[:, token] = -torch.inf
        z_scores = action.z_scores(S).masked_fill(S.scale == 0, -torch.inf)  # a row of zeros has none
        columns.append((S.loc.amax(-1), z_scores.amax(-1)))
    if not columns:
        return _Rivals(U0.loc, U0.loc)
    return _Rivals(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _leads(model: CausalLM, token: int, U: Cauchy, U0: Cauchy, rivals: _Rivals) -> _Leads:
    action = model.action
    S = action.scores(U, U0, model.lm_head.weight, slice(token, token + 1))  # (n, 1)
    logit, scale = S.loc[:, 0], S.scale[:, 0]
    height = logit - exact(action.threshold[token])
    return _Leads(logit - rivals.logit, height - scale * rivals.z_score, height)


def _cuts(wanted: Tensor, unwanted: Tensor, odds: float) -> tuple[float, float]:
    """Between which cuts few of the first (N,) are below and few of the second (M,) above.

    The fewest in all, with the second ``odds`` times as many, and at most a tenth of the first more. Where
    the two are apart, that is between nine tenths of either.
    """
    if len(unwanted) == 0:
        low = float(wanted.quantile(SLACK)) - MARGIN
        return low, low
    cuts = torch.cat([wanted, unwanted]).sort().values
    below = torch.searchsorted(wanted.sort().values, cuts) / len(wanted)
    above = 1 - torch.searchsorted(unwanted.sort().values, cuts, right=True) / len(unwanted)
    wrong = below + odds * above
    good = cuts[wrong <= wrong.min() + SLACK]
    return float(good[0]), float(good[-1])
