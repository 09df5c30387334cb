"""One-vs-Rest classification and the gated number loss, as equations.

The readable versions here are the oracle of the fast ones. Positions arrive flat: the shift of labels, their −100 and the
batch belong to the model.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.heads import exact

__all__ = ["IGNORE_INDEX", "number_gate", "number_loss", "ovr_loss"]

IGNORE_INDEX = -100
OvrImpl = Literal["reference", "fused", "sampled"]


def ovr_loss(
    loc_U: Tensor,
    scale_U: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor,
    balance: Tensor,
    threshold: Tensor,
    loc_U0: Tensor,
    scale_U0: Tensor,
    num_items: Tensor | int | None = None,
    impl: OvrImpl = "reference",
) -> Tensor:
    """L_cls = −Σ_i Σ_k [ y_ik log P(S_ik > C_k) + (1 − y_ik) log P(S_ik ≤ C_k) ] / num_items.

    loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + |balance|·mean(scale_U) + scale_U0.

    Args:
        loc_U: (N, D) locations of U'.
        scale_U: (N, D) scales of U', > 0.
        weight: (V, D) W, any float dtype.
        labels: (N,) token ids; −100 is ignored.
        bias: (V,) b.
        balance: (V,) relative read-out noise; its magnitude counts.
        threshold: (V,) C.
        loc_U0: (N,) location of the common cause.
        scale_U0: (N,) scale of the common cause.
        num_items: What the sum is divided by; None divides by the number of labels that are not ignored.
        impl: "reference" is dense autograd.

    Returns:
        A scalar; 0 with zero gradients when every label is ignored.
    """
    valid = labels != IGNORE_INDEX
    if num_items is None:
        num_items = valid.sum().clamp(min=1)
    if impl != "reference":
        raise ValueError(f"impl is {impl!r}; choose 'reference'")
    U = Cauchy(exact(loc_U[valid]), exact(scale_U[valid]))
    S = U.linear(exact(weight), exact(bias))
    loc_S = S.loc + loc_U0[valid, None]  # (N, V)
    scale_S = S.scale + magnitude(exact(balance)) * U.scale.mean(-1, keepdim=True) + scale_U0[valid, None]
    S = Cauchy(loc_S, scale_S)
    is_label = torch.nn.functional.one_hot(labels[valid], weight.shape[0]).bool()
    log_likelihood = torch.where(is_label, S.log_sf(threshold), S.log_cdf(threshold))
    return -log_likelihood.sum() / num_items


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
    law = Cauchy(Y.loc.to(target.dtype), Y.scale.to(target.dtype))
    return (-(gate * law.log_prob(target)).sum() / num_items).to(Y.loc.dtype)
