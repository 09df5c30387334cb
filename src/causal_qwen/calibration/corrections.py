"""Three corrections inside the linear Cauchy law that make transfer exact.

1. Balance: read-out noise that gives every token the same scale, so that dividing by it reorders nothing.
2. Common cause: logsumexp of the logits, fitted by ridge regression and subtracted through U₀, since a fixed
   threshold is not blind to a common shift as softmax is.
3. Scale and gain: γ and C that minimise the One-vs-Rest loss, then κ at which causal sampling picks the
   base's favourite as often as softmax sampling does.

Everything is measured on a text and deterministic by seed; the scores of a few hundred positions are kept, of
the others a block at a time. What is kept of a block is written into memory made before: small results that
stay between large ones that go would keep malloc from giving memory back. This module does not know where
the text comes from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize
from torch import Tensor

from causal_qwen.calibration.gain import match_gain
from causal_qwen.calibration.regression import Ridge, ridge
from causal_qwen.calibration.text import WEIGHT_ROWS, TextFeatures, block_rows, logit_blocks
from causal_qwen.cauchy import Cauchy
from causal_qwen.causal_lm import CausalLM
from causal_qwen.heads import exact
from causal_qwen.losses import ovr_terms
from causal_qwen.progress import Watch, unwatched

__all__ = ["FIT_POSITIONS", "Calibration", "calibrate", "search_scale"]

LOSS_ELEMENTS = 2**20  # of a (positions, V) block of losses
USUAL_STEPS = 40  # of the search for γ and C, for those who wait
FIT_POSITIONS = 256  # positions on which γ, C and κ are fitted
FIRST_SCALE = 1e-3  # scale_S at which the search for γ begins; C begins at 0
FIRST_STEPS = (0.5, -0.5)  # in log scale_S and in C
# The loss of a few hundred positions is rough on smaller steps than these.
TOLERANCE = {"xatol": 0.05, "fatol": 0.01}


@dataclass(frozen=True)
class Calibration:
    """What calibration chose, and what it measured on its own text.

    Args:
        positions: Positions of text used.
        gamma: scale_U + |b_noise|, shared evenly by the two.
        threshold: C.
        noise_gain: κ.
        ridge: Strength of the ridge penalty, chosen by leave-one-out.
        common_cause_r2: Share of the variance of logsumexp explained, leave-one-out.
        ovr_loss: One-vs-Rest loss per position at (gamma, threshold).
        top1_rate_softmax: How often softmax sampling at T = 1 picks the favourite.
        top1_rate_causal: The same for causal sampling at κ.
    """

    positions: int
    gamma: float
    threshold: float
    noise_gain: float
    ridge: float
    common_cause_r2: float
    ovr_loss: float
    top1_rate_softmax: float
    top1_rate_causal: float


@torch.no_grad()
def calibrate(model: CausalLM, text: TextFeatures, *, seed: int = 0, watch: Watch = unwatched) -> Calibration:
    """Set balance, U₀, γ, C and κ of ``model`` in place.

    Args:
        model: Converted with ``abduction_init_strategy="identity"``: scale_U the same in every dimension.
        text: Features of the calibration text.
        seed: Of the positions drawn for the fit, and of the noise that κ is matched with.
        watch: Told of the fits.
    """
    generator = torch.Generator().manual_seed(seed)
    largest_norm = _set_balance(model)
    common = _set_common_cause(model, text.hidden_states, watch)

    subset = torch.randperm(len(text.labels), generator=generator)[:FIT_POSITIONS].to(text.labels.device)
    hidden_states = text.hidden_states[subset]  # (FIT_POSITIONS, H)
    labels, shift = text.labels[subset], common.left_out[subset]
    scale, threshold, ovr_loss = _fit_scale(model, hidden_states, labels, shift, watch)
    gamma = scale / largest_norm
    model.abduction.scale.bias.fill_(model.abduction.inverse_activation(gamma / 2))
    model.action.b_noise.fill_(gamma / 2)
    model.action.threshold.fill_(threshold)

    gain = match_gain(model, hidden_states, generator, watch=watch)
    model.config.noise_gain = gain.noise_gain
    return Calibration(
        positions=len(text.labels),
        gamma=gamma,
        threshold=threshold,
        noise_gain=gain.noise_gain,
        ridge=common.strength,
        common_cause_r2=common.r2,
        ovr_loss=ovr_loss,
        top1_rate_softmax=gain.softmax_rate,
        top1_rate_causal=gain.causal_rate,
    )


def _set_balance(model: CausalLM) -> float:
    """balance_k = max_j ‖W_j‖₁ − ‖W_k‖₁; the largest norm is returned."""
    weight = model.lm_head.weight
    norms = torch.empty(len(weight), device=weight.device, dtype=exact(weight[:0]).dtype)  # (V,)
    # In blocks, so that |W| is never whole.
    for part, block in zip(norms.split(WEIGHT_ROWS), weight.split(WEIGHT_ROWS), strict=True):
        part.copy_(exact(block).abs().sum(-1))
    model.action.balance.copy_(norms.max() - norms)
    return float(norms.max())


def _set_common_cause(model: CausalLM, hidden_states: Tensor, watch: Watch) -> Ridge:
    """loc_U0 = −(a·z + c), with a·z + c the regression of logsumexp(logits) on z (N, H)."""
    logsumexp = hidden_states.new_empty(len(hidden_states))  # (N,)
    with watch("calibrating: common cause", len(hidden_states)) as advance:
        blocks = zip(logsumexp.split(block_rows(model)), logit_blocks(model, hidden_states), strict=True)
        for part, logits in blocks:
            part.copy_(logits.logsumexp(-1))
            advance(len(logits))
    fit = ridge(hidden_states, logsumexp)
    model.abduction.common.weight.copy_(fit.slope[None])
    model.abduction.common.bias.fill_(fit.intercept)
    return fit


def _fit_scale(
    model: CausalLM, hidden_states: Tensor, labels: Tensor, shift: Tensor, watch: Watch
) -> tuple[float, float, float]:
    """scale_S and C that minimise the One-vs-Rest loss per position, and that loss.

    The model is balanced, so that one scale serves all tokens; ``shift`` (N,) are left-out predictions of
    logsumexp, so that the fit is not flattered.
    """
    scores = hidden_states.new_empty(len(hidden_states), model.config.vocab_size)  # (N, V)
    for rows, logits, part in zip(
        scores.split(block_rows(model)),
        logit_blocks(model, hidden_states),
        shift.split(block_rows(model)),
        strict=True,
    ):
        torch.sub(logits, part[:, None], out=rows)

    log_scale, threshold, loss = search_scale(
        scores, scores.new_ones(()), labels, start=math.log(FIRST_SCALE), watch=watch
    )
    return math.exp(log_scale), threshold, loss


def search_scale(
    scores: Tensor, scale: Tensor, labels: Tensor, *, start: float = 0.0, watch: Watch = unwatched
) -> tuple[float, float, float]:
    """(log factor, C, loss) at the least One-vs-Rest loss per position of Cauchy(scores, factor·scale).

    Args:
        scores: (N, V) loc_S, against the threshold C of all tokens.
        scale: (N, V), or a scalar for all.
        labels: (N,).
        start: Log factor at which the search begins; C begins at 0.
        watch: Told of the steps.
    """
    terms = scores.new_empty(len(scores))  # (N,)
    positions = max(1, LOSS_ELEMENTS // scores.shape[1])
    scale = scale.expand_as(scores)

    def loss(point: tuple[float, float]) -> float:
        factor, C = math.exp(point[0]), scores.new_tensor(point[1])
        blocks = (column.split(positions) for column in (terms, scores, scale, labels))
        for part, block, widths, tokens in zip(*blocks, strict=True):
            part.copy_(ovr_terms(Cauchy(block, widths * factor), C, tokens))
        advance(1)
        return terms.double().mean().item()

    simplex = [[start, 0.0], [start + FIRST_STEPS[0], 0.0], [start, FIRST_STEPS[1]]]
    options = {"initial_simplex": simplex, **TOLERANCE}
    with watch("calibrating: scale", USUAL_STEPS) as advance:
        minimum = minimize(loss, simplex[0], method="Nelder-Mead", options=options)
    log_factor, threshold = minimum.x.tolist()
    return log_factor, threshold, float(minimum.fun)
