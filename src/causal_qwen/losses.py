"""One-vs-Rest classification and the gated number loss, as equations.

The readable versions here are the oracle of the fast ones in `causal_qwen.kernels`. Positions arrive flat:
the shift of labels and the batch belong to the model.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.heads import token_scores
from causal_qwen.kernels.negatives import draw_candidates
from causal_qwen.kernels.ovr import Scores, ovr_sum
from causal_qwen.kernels.rivals import rivals_of
from causal_qwen.labels import IGNORE_INDEX

__all__ = ["IGNORE_INDEX", "OvrImpl", "balanced_cause", "number_gate", "number_loss", "ovr_loss", "ovr_terms"]

OvrImpl = Literal["reference", "fused", "sampled"]
HALVINGS = 48  # of the bracket of a common cause: as fine as float32
# What the height of all words weighs beside their order: with 1 it takes three points of accuracy.
COMMON_SHARE = 0.1
# −log of a Cauchy tail is steepest x scales beyond the threshold, where 2x·atan2(1, x) = 1.
STEEPEST = 0.428978


def ovr_terms(S: Cauchy, threshold: Tensor, labels: Tensor, *, gradient_bound: float | None = None) -> Tensor:
    """−Σ_k [ y_k log P(S_k > C_k) + (1 − y_k) log P(S_k ≤ C_k) ] of each position, (...).

    Args:
        S: Token scores, (..., V); a scale that is the same for all may be a scalar.
        threshold: C, (V,) or a scalar.
        labels: (...) token ids.
        gradient_bound: As for `ovr_loss`.
    """
    if gradient_bound is not None:
        return _bounded_terms(S, threshold, labels, gradient_bound)
    column = labels.unsqueeze(-1)
    scale, threshold = S.scale.expand_as(S.loc), threshold.expand_as(S.loc)
    label = Cauchy(S.loc.gather(-1, column), scale.gather(-1, column))
    is_label = label.log_sf(threshold.gather(-1, column))  # (..., 1)
    return -S.log_cdf(threshold).scatter(-1, column, is_label).sum(-1)


def _bounded_terms(S: Cauchy, threshold: Tensor, labels: Tensor, bound: float) -> Tensor:
    """`ovr_terms` as they are, with the tangent ∂/∂loc_S cut off at ±bound."""
    height = S.loc - threshold  # (..., V), above the threshold
    law = Cauchy(height.detach(), S.scale)
    slope = _slopes(law, labels, bound=bound)
    return ovr_terms(law, torch.zeros_like(height), labels) + (slope * (height - law.loc)).sum(-1)


@torch.no_grad()
def _slopes(S: Cauchy, labels: Tensor, *, bound: float | None = None) -> Tensor:
    """∂/∂loc_S of `ovr_terms` at the threshold 0, (..., V), cut off at ±bound.

    ∂(−log P)/∂loc_S is a hazard rate: density over probability at the threshold, f/F of every token but the
    label, whose own is −f/(1 − F).
    """
    column, zero = labels.unsqueeze(-1), torch.zeros_like(S.loc)
    density, label_tail = S.log_prob(zero), S.log_sf(zero).gather(-1, column)
    slope = (density - S.log_cdf(zero)).exp()
    slope.scatter_(-1, column, -(density.gather(-1, column) - label_tail).exp())
    return _cut_off(slope, bound)


def _cut_off(slope: Tensor, bound: float | None) -> Tensor:
    return slope if bound is None else slope.clamp(-bound, bound)


def ovr_loss(
    U: Cauchy,
    U0: Cauchy,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor,
    balance: Tensor,
    threshold: Tensor,
    num_items: Tensor | int | None = None,
    gradient_bound: float | None = None,
    rivals: int | None = None,
    rival_scale: float = 0.05,
    impl: OvrImpl = "reference",
    block_size: int | None = None,
    num_negatives: int = 4096,
    num_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """L_cls = −Σ_i Σ_k [ y_ik log P(S_ik > C_k) + (1 − y_ik) log P(S_ik ≤ C_k) ] / num_items.

    loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + |balance|·mean(scale_U) + scale_U0, in float32 at
    least, under autocast too.

    Args:
        U: U', (N, D), scales > 0.
        U0: The common cause, (N,).
        weight: (V, D) W, any float dtype.
        labels: (N,) token ids; −100 is ignored and costs nothing.
        bias: (V,) b.
        balance: (V,) relative read-out noise; its magnitude counts.
        threshold: (V,) C.
        num_items: What the sum is divided by; None divides by the number of labels that are not ignored.
        gradient_bound: What |∂L_i/∂loc_S,ik| of a position's own sum is cut off at, for every score; the loss
            and ∂L_i/∂scale_S,ik stay as they are. None leaves the derivative, which reaches 1/scale_S.
        rivals: K, against how many other words a label stands, those with the largest loc_S − C. Then the law
            is Cauchy(loc_S, rival_scale), and the gradient in W, loc_U, b and C is that at `balanced_cause`
            in place of loc_U0, held constant; the loss, and its gradient in loc_U0, cut off as well and a
            tenth of that, are taken at loc_U0. Scales have none. None is all words, under scale_S.
        rival_scale: Of every score among rivals.
        impl: How the sum over all words is computed. "reference" is dense autograd. "fused" gives the same
            number and gradients in one walk over blocks of W that keeps no (N, V) tensor. "sampled" estimates
            both, unbiased, from the labels of the batch, <NUM> and ``num_negatives`` drawn tokens.
        block_size: Rows of W per block of the walk; None chooses from the sizes.
        num_negatives: m, how many tokens "sampled" draws.
        num_token_id: <NUM>, which "sampled" always includes; None if there is none.
        generator: Source of the draw; None is torch's default.

    Returns:
        A scalar; 0 with zero gradients when every label is ignored.

    Raises:
        ValueError: If an option or a label has no meaning; the message names it.
    """
    vocab_size = weight.shape[0]
    if impl not in get_args(OvrImpl):
        raise ValueError(f"impl is {impl!r}; choose one of {', '.join(map(repr, get_args(OvrImpl)))}")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size!r}; it counts rows of W: at least 1, or None")
    if num_negatives < 1:
        raise ValueError(f"num_negatives is {num_negatives!r}; at least 1 token has to be drawn")
    if gradient_bound is not None and not 0 < gradient_bound < math.inf:
        raise ValueError(f"gradient_bound is {gradient_bound!r}; it must be above 0, or None for no bound")
    if rivals is not None and rivals < 1:
        raise ValueError(f"rivals is {rivals!r}; at least 1 word stands against a label, or None for all")
    if not 0 < rival_scale < math.inf:
        raise ValueError(f"rival_scale is {rival_scale!r}; it must be above 0")
    if num_token_id is not None and not 0 <= num_token_id < vocab_size:
        raise ValueError(f"num_token_id is {num_token_id!r}; W has {vocab_size} rows")

    valid = labels != IGNORE_INDEX
    if num_items is None:
        num_items = valid.sum().clamp(min=1)
    if not valid.all():
        labels, U, U0 = labels[valid], U[valid], U0[valid]
    strange = labels[(labels < 0) | (labels >= vocab_size)]
    if strange.numel():
        raise ValueError(f"a label is {strange[0]}; W has {vocab_size} rows, {IGNORE_INDEX} is ignored")

    with torch.autocast(U.loc.device.type, enabled=False):
        dtype = torch.promote_types(U.loc.dtype, weight.dtype)
        U, U0 = U.to(dtype), U0.to(dtype)
        bias, threshold, balance = bias.to(dtype), threshold.to(dtype), magnitude(balance.to(dtype))
        if rivals is not None:
            words = rivals_of(U.loc, weight, labels, offset=bias - threshold, count=rivals)  # (N, 1 + K)
            W_words = weight[words].to(dtype)  # (N, 1 + K, D)
            height = torch.einsum("nkd,nd->nk", W_words, U.loc) + (bias - threshold)[words]  # (N, 1 + K)
            terms = _rival_terms(height, U0.loc, rival_scale, gradient_bound)
            # Still connected: processes that share gradients wait for those of every parameter.
            unused = U.scale.sum() + U0.scale.sum() + balance.sum()
            return terms.sum() / num_items + 0.0 * unused
        if impl == "reference":
            S = token_scores(U, U0, weight.to(dtype), bias=bias, balance=balance)
            terms = ovr_terms(S, threshold, labels, gradient_bound=gradient_bound)
            return terms.sum() / num_items

        offset = bias - threshold  # (V,): the threshold of every token moves to 0
        importance = torch.ones_like(offset)
        if impl == "sampled":
            numbers = labels.new_tensor([] if num_token_id is None else [num_token_id])
            certain = torch.unique(torch.cat([labels, numbers]))  # sorted
            tokens, importance = draw_candidates(certain, vocab_size, num_negatives, generator=generator)
            weight, offset, balance = (t.index_select(0, tokens) for t in (weight, offset, balance))
            importance = importance.to(dtype)
            labels = torch.searchsorted(certain, labels)  # rows of the selection: certain tokens come first
        X = torch.cat([U.loc, U0.loc[:, None], torch.ones_like(U0.loc)[:, None]], -1)  # (N, D + 2)
        Y = torch.cat([U.scale, U0.scale[:, None], U.scale.mean(-1, keepdim=True)], -1)  # (N, D + 2)
        importance = importance / num_items  # before it is summed: a bfloat16 gradient of W is rounded once
        loss: Tensor = ovr_sum(
            Scores(X, Y, weight, offset, balance),
            labels,
            importance,
            steepest=None if gradient_bound is None else importance * gradient_bound,
            block_size=block_size,
        )
        return loss


def _rival_terms(height: Tensor, loc_U0: Tensor, scale: float, bound: float | None) -> Tensor:
    """One-vs-Rest at loc_U0 (N,) of the words at ``height`` (N, 1 + K), the label first, with the slopes of
    `balanced_cause` in ``height`` and a tenth of their sum at loc_U0, cut off too, in loc_U0.
    """
    held, foreseen, width = height.detach(), loc_U0.detach(), height.new_tensor(scale)
    labels = torch.zeros_like(foreseen, dtype=torch.long)
    balanced = balanced_cause(held, scale=scale, gradient_bound=bound)  # (N,)
    law, at_balance = (Cauchy(held + u[:, None], width) for u in (foreseen, balanced))
    slope = _slopes(at_balance, labels, bound=bound)  # (N, 1 + K)
    common = COMMON_SHARE * _cut_off(_slopes(law, labels, bound=bound).sum(-1), bound)  # (N,)
    terms = ovr_terms(law, height.new_zeros(()), labels)
    return terms + (slope * (height - held)).sum(-1) + common * (loc_U0 - foreseen)


@torch.no_grad()
def balanced_cause(height: Tensor, *, scale: float, gradient_bound: float | None = None) -> Tensor:
    """The common cause u (N,) at which a label is pulled up as hard as all its rivals are pushed down.

    A root of Σ_k ∂L/∂loc_S,k at ``height`` + u, every slope cut off at the bound, by halving a bracket: at
    its lower end everything lies so far below the threshold that the label is the steepest, at its upper end
    the highest rival is as steep as a score can be.

    Args:
        height: (N, 1 + K) loc_S − C without a common cause, the label first.
        scale: Of every score.
        gradient_bound: As for `ovr_loss`.
    """
    label, rivals = height[:, 0], height[:, 1:]
    if not rivals.numel():
        return -label
    top, tails = rivals.amax(-1), rivals.shape[1] * scale
    depth = 4 * (1 + tails + (top - label).clamp(min=0)) + math.sqrt(tails / (gradient_bound or math.inf))
    low, high = -torch.maximum(top, label) - depth, STEEPEST * scale - top
    labels = torch.zeros_like(label, dtype=torch.long)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        law = Cauchy(height + middle[:, None], height.new_tensor(scale))
        too_high = _slopes(law, labels, bound=gradient_bound).sum(-1) > 0
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    return (low + high) / 2


def number_gate(prob_num: Tensor, *, alpha: float, gradient: bool = True) -> Tensor:
    """α + (1 − α)·P_<NUM>: how much a number counts before the model expects one.

    Args:
        prob_num: P_<NUM>, any shape.
        alpha: 0 classifies first, then regresses; 1 always regresses.
        gradient: Whether the number loss may move P_<NUM>.
    """
    return alpha + (1 - alpha) * (prob_num if gradient else prob_num.detach())


def number_loss(Y: Cauchy, target: Tensor, gate: Tensor, *, num_items: Tensor | int | None = None) -> Tensor:
    """L_reg = Σ_i gate_i·(−log p_Y(target_i)) / num_items, over the positions whose next token is a number.

    Args:
        Y: The number's law in value space, (M,).
        target: g(v), standardised, (M,).
        gate: (M,).
        num_items: What the sum is divided by; None divides by M.

    Returns:
        A scalar; 0 with zero gradients when M is 0.
    """
    if num_items is None:
        num_items = max(target.numel(), 1)
    # In the target's precision: a linear value space holds targets that float32 cannot.
    return (-(gate * Y.to(target.dtype).log_prob(target)).sum() / num_items).to(Y.loc.dtype)
