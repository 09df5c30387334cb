"""Calibration: three corrections inside the linear Cauchy law that make transfer exact.

1. Balance: read-out noise that gives every token the same scale, so that dividing by it reorders nothing.
2. Common cause: logsumexp of the logits, fitted by ridge regression and subtracted through U₀, since a fixed
threshold
   is not blind to a common shift as softmax is.
3. Scale and gain: γ and C that minimise the One-vs-Rest loss, then κ at which causal sampling picks the
base's favourite
   as often as softmax sampling does.

Everything is measured on a text, deterministic by seed, and walks over positions in blocks: no (N, V) tensor
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from causal_qwen.cauchy import Cauchy, standard_draw
from causal_qwen.heads import exact
from causal_qwen.losses import ovr_terms
from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM

__all__ = ["Calibration", "Features", "Ridge", "calibrate", "features", "match_gain", "ridge", "windows"]

WINDOW = 256  # tokens per forward pass
MAX_WINDOWS = 8  # spread evenly over the text, so that a long one costs no more than a short one
MIN_TOKENS = 64
FIT_POSITIONS = 256  # positions on which γ, C and κ are fitted
GAIN_DRAWS = 4  # causes drawn per position to match κ
BLOCK_ELEMENTS = 2**24  # elements of a (positions, V) block: 64 MiB in float32


@dataclass(frozen=True)
class Features:
    """Backbone features of a text and the tokens that followed.

    Args:
        hidden_states: (N, H).
        labels: (N,).
    """

    hidden_states: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Calibration:
    """What calibration chose and what it saw on its own text.

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
def features(model: CausalQwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> Features:
    """Backbone features of evenly spread windows of ``text``; each position is paired with the token that
    follows it.

    Raises:
        ValueError: If the text is too short to calibrate on.
    """
    hidden_states, labels = [], []
    for window in windows(tokenizer, text):
        window = window.to(model.device)
        hidden_states.append(model.model(input_ids=window[None]).last_hidden_state[0, :-1])
        labels.append(window[1:])
    return Features(exact(torch.cat(hidden_states)), torch.cat(labels))


def windows(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Tensor]:
    """At most MAX_WINDOWS stretches of WINDOW tokens each, spread evenly over ``text``.

    Raises:
        ValueError: If the text has fewer than MIN_TOKENS tokens.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text has only {len(ids)} tokens; give at least {MIN_TOKENS}")
    count = min(MAX_WINDOWS, -(-len(ids) // WINDOW))
    starts = torch.linspace(0, max(len(ids) - WINDOW, 0), count).long().tolist()
    return [ids[start : start + WINDOW] for start in starts]


@torch.no_grad()
def calibrate(model: CausalQwen2ForCausalLM, text_features: Features, *, seed: int = 0) -> Calibration:
    """Set balance, U₀, γ, C and κ of ``model`` in place.

    Args:
        model: Converted with ``abduction_init_strategy="identity"``: scale_U the same in every dimension.
        text_features: Features of the calibration text.
        seed: Of the positions drawn for the fit, and of the noise that κ is matched with.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = _row_norms(model.lm_head.weight)  # (V,)
    model.action.balance.copy_(norms.max() - norms)

    z = text_features.hidden_states
    logsumexp = torch.cat([logits.logsumexp(-1) for logits in _logit_blocks(model, z)])  # (N,)
    fit = ridge(z, logsumexp)
    model.abduction.common.weight.copy_(fit.slope[None])
    model.abduction.common.bias.fill_(fit.intercept)

    subset = torch.randperm(len(z), generator=generator)[:FIT_POSITIONS].to(z.device)
    labels, shift = text_features.labels[subset], fit.left_out[subset]
    objective = _ovr_objective(model, z[subset], labels, shift)
    log_scale, threshold, ovr_loss = _minimise(objective)
    gamma = math.exp(log_scale) / norms.max().item()
    model.abduction.scale.bias.fill_(model.abduction.inverse_activation(gamma / 2))
    model.action.b_noise.fill_(gamma / 2)
    model.action.threshold.fill_(threshold)

    noise_gain, softmax_rate, causal_rate = match_gain(model, z[subset], generator)
    model.config.noise_gain = noise_gain
    return Calibration(
        positions=len(z),
        gamma=gamma,
        threshold=threshold,
        noise_gain=noise_gain,
        ridge=fit.strength,
        common_cause_r2=fit.r2,
        ovr_loss=ovr_loss,
        top1_rate_softmax=softmax_rate,
        top1_rate_causal=causal_rate,
    )


def _row_norms(weight: Tensor) -> Tensor:
    """‖W_k‖₁ per row, in blocks so that |W| is never whole."""
    return torch.cat([exact(block).abs().sum(-1) for block in weight.split(8192)])


def _logit_blocks(model: CausalQwen2ForCausalLM, z: Tensor) -> Iterator[Tensor]:
    """Logits (n, V) in float32 for successive blocks of positions."""
    rows = max(1, BLOCK_ELEMENTS // model.config.vocab_size)
    for block in z.split(rows):
        U, _ = model.abduction(block)
        yield exact(model.token_logits(U.loc))


@dataclass(frozen=True)
class Ridge:
    """target ≈ slope·features + intercept.

    Args:
        slope: (H,).
        intercept: Not penalised.
        left_out: (N,) prediction of each target by the fit to all others.
        strength: Of the penalty.
        r2: Share of the variance explained, leave-one-out.
    """

    slope: Tensor
    intercept: float
    left_out: Tensor
    strength: float
    r2: float


def ridge(features: Tensor, target: Tensor, *, slack: float = 0.0) -> Ridge:
    """Ridge regression whose strength minimises the closed-form leave-one-out error, in float64.

    Args:
        features: (N, H).
        target: (N,).
        slack: The strongest penalty is taken whose error is at most 1 + slack times the least.
    """
    x, y = features.double(), target.double()
    x_mean, y_mean = x.mean(0), y.mean()
    centred, residual = x - x_mean, y - y_mean
    left, singular, right = torch.linalg.svd(centred, full_matrices=False)  # (N, R), (R,), (R, H)
    projected = left.T @ residual  # (R,)
    found: list[tuple[float, float, Tensor]] = []
    for strength in (
        singular[0] ** 2 * torch.logspace(-9, 1, 41, dtype=torch.float64, device=x.device)
    ).tolist():
        shrink = singular**2 / (singular**2 + strength)  # (R,)
        fitted = left @ (shrink * projected)
        leverage = (left.square() * shrink).sum(-1) + 1 / len(y)
        left_out = y - (residual - fitted) / (1 - leverage).clamp(min=1e-6)
        error = (left_out - y).square().mean().item()
        found.append((error, strength, left_out))
    least = min(error for error, _, _ in found)
    error, strength, left_out = [fit for fit in found if fit[0] <= (1 + slack) * least][-1]
    slope = right.T @ (singular / (singular**2 + strength) * projected)
    return Ridge(
        slope=slope.to(features.dtype),
        intercept=(y_mean - x_mean @ slope).item(),
        left_out=left_out.to(features.dtype),
        strength=strength,
        r2=1 - error / residual.square().mean().item(),
    )


def _ovr_objective(
    model: CausalQwen2ForCausalLM, z: Tensor, labels: Tensor, shift: Tensor
) -> Callable[[float, float], float]:
    """The One-vs-Rest loss per position as a function of (log scale_S, C), the shift being held out."""
    scores = torch.cat(list(_logit_blocks(model, z))) - shift[:, None]  # (FIT_POSITIONS, V)

    def loss(log_scale: float, threshold: float) -> float:
        scale, C = (torch.tensor(value, device=scores.device) for value in (math.exp(log_scale), threshold))
        blocks = zip(scores.split(64), labels.split(64), strict=True)
        terms = [ovr_terms(Cauchy(block, scale), C, tokens) for block, tokens in blocks]
        return torch.cat(terms).double().mean().item()

    return loss


def _minimise(loss: Callable[[float, float], float]) -> tuple[float, float, float]:
    """Pattern search over (log scale_S, C): the loss is smooth, evaluations are what costs."""
    point, step = (math.log(1e-3), 0.0), (1.0, 1.0)
    value = loss(*point)
    while step[0] > 0.02:
        moves = [
            (point[0] + step[0] * i, point[1] + step[1] * j) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1))
        ]
        for move in moves:
            candidate = loss(*move)
            if candidate < value:
                point, value = move, candidate
                break
        else:
            step = (step[0] / 3, step[1] / 3)
    return (*point, value)


@torch.no_grad()
def match_gain(
    model: CausalQwen2ForCausalLM, z: Tensor, generator: torch.Generator
) -> tuple[float, float, float]:
    """κ by bisection: the rate at which argmax W(loc_U + κ(scale_U + |b_noise|)ε) + b is the favourite equals
    softmax's rate.

    The scores are linear in κ, so W is read once per draw and not once per trial; the same draws serve every
    trial.

    Args:
        model: Any causal model; after training scale_U differs by position and dimension.
        z: (N, H) features of a few hundred positions.
        generator: Of the noise.

    Returns:
        κ, and the rates of softmax and of causal sampling.
    """
    scale = model.action.exogenous(model.abduction(z)[0]).scale  # (N, D)
    floor, size = model.config.density_floor, model.lm_head.in_features
    logits = torch.cat(list(_logit_blocks(model, z)))  # (FIT_POSITIONS, V)
    favourite = logits.argmax(-1)
    softmax_rate = (
        (logits.gather(-1, favourite[:, None]) - logits.logsumexp(-1, keepdim=True)).exp().mean().item()
    )
    uniform = torch.rand(GAIN_DRAWS, len(z), size, generator=generator).to(z.device)
    noise = [
        torch.nn.functional.linear(
            scale * standard_draw(draw, density_floor=floor), exact(model.lm_head.weight)
        )
        for draw in uniform
    ]  # GAIN_DRAWS × (FIT_POSITIONS, V)

    def causal_rate(gain: float) -> float:
        same = [torch.add(logits, draw, alpha=gain).argmax(-1) == favourite for draw in noise]
        return torch.stack(same).double().mean().item()

    low, high = 0.0, 1.0 / scale.median().item()
    while causal_rate(high) > softmax_rate:
        high *= 2
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if causal_rate(middle) > softmax_rate else (low, middle)
    gain = (low + high) / 2
    return gain, softmax_rate, causal_rate(gain)
