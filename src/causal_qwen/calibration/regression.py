"""Ridge regression with its leave-one-out predictions in closed form.

scikit-learn's RidgeCV chooses the same strength and slope (the tests compare the two), but does not hand out
the left-out predictions, which the fits that build on a regression need. This module does not know models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Ridge", "ridge"]

# Penalties that are tried, relative to the largest squared singular value.
STRENGTHS = (-9, 1, 41)


class Ridge(NamedTuple):
    """target ≈ slope·features + intercept."""

    slope: Tensor  # (H,)
    intercept: float  # not penalised
    left_out: Tensor  # (N,) prediction of each target by the fit to all others
    strength: float  # of the penalty
    r2: float  # share of the variance explained, leave-one-out


def ridge(features: Tensor, target: Tensor, *, slack: float = 0.0) -> Ridge:
    """Ridge regression whose strength minimises the closed-form leave-one-out error, in float64.

    With X = L·diag(s)·Rᵀ and d = s²/(s² + strength), the fit is L d Lᵀ y, its leverage Σ_r L²_ir d_r + 1/N,
    and a left-out residual is the residual divided by 1 − leverage.

    Args:
        features: (N, H).
        target: (N,).
        slack: The strongest penalty is taken whose error is at most 1 + slack times the least.
    """
    x, y = features.double(), target.double()
    x_mean, y_mean = x.mean(0), y.mean()
    centred = y - y_mean
    left, singular, right = torch.linalg.svd(x - x_mean, full_matrices=False)  # (N, R), (R,), (R, H)
    projected = left.T @ centred  # (R,)
    strengths = singular[0].square() * torch.logspace(*STRENGTHS, dtype=y.dtype, device=y.device)  # (K,)
    shrink = singular.square() / (singular.square() + strengths[:, None])  # (K, R)
    fitted = (shrink * projected) @ left.T  # (K, N)
    leverage = shrink @ left.square().T + 1 / len(y)  # (K, N)
    left_out = y - (centred - fitted) / (1 - leverage).clamp(min=1e-12)  # (K, N)
    errors = (left_out - y).square().mean(-1)  # (K,)
    chosen = int((errors <= (1 + slack) * errors.min()).nonzero()[-1])
    slope = right.T @ (singular / (singular.square() + strengths[chosen]) * projected)  # (H,)
    return Ridge(
        slope=slope.to(features.dtype),
        intercept=float(y_mean - x_mean @ slope),
        left_out=left_out[chosen].to(features.dtype),
        strength=float(strengths[chosen]),
        r2=1 - float(errors[chosen] / centred.square().mean()),
    )
