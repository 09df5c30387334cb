"""−log P of one Cauchy tail and its two slopes, for a whole block of scores in one pass.

With d = loc_S for a token that is not the label and d = −loc_S for the one that is (thresholds are 0 here),

    loss = −log(θ/π),  θ = atan2(scale_S, d),  h² = scale_S² + d²
    ∂loss/∂d = scale_S/(h²·θ),  ∂loss/∂scale_S = −d/(h²·θ)

which is `causal_qwen.cauchy.log_tail` with its gradients; ∂loss/∂d may be cut off at a bound. This module
does not know where scores come from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from causal_qwen.kernels.compiled import CompiledKernel

__all__ = ["tail_block_"]

# Smaller blocks never call the compiler: a one-off use should not wait for it.
SMALLEST_COMPILED = 1 << 16


def tail_block_(
    loc: Tensor, scale: Tensor, loss: Tensor, labels: Tensor, importance: Tensor, steepest: Tensor
) -> None:
    """loss ← loss − w log P, loc ← ∂(−w log P)/∂loc_S, scale ← ∂(−w log P)/∂scale_S, in place.

    Args:
        loc: (n, v) loc_S; overwritten.
        scale: (n, v) scale_S, > 0; overwritten.
        loss: (n, v) running sums.
        labels: (n,) int32, the label's column in this block; any other number when it lies outside.
        importance: (v,) w, how many tokens each column stands for.
        steepest: (v,) what the size of ∂(−w log P)/∂loc_S is cut off at, ∞ for the derivative as it is.
    """
    # A size of 1 would be a variant of its own.
    large = loc.numel() >= SMALLEST_COMPILED and min(loc.shape) > 1
    kernel = _tail if large and loc.dtype == torch.float32 else _plain_tail
    kernel(loc, scale, loss, labels, importance, steepest)


def _tail_formula(
    arctangent: Callable[[Tensor], Tensor],
    minus_log: Callable[[Tensor, Tensor], Tensor],
    loc: Tensor,
    scale: Tensor,
    loss: Tensor,
    labels: Tensor,
    importance: Tensor,
    steepest: Tensor,
) -> None:
    # Constants are written out: the compiler would read a module's float at every element.
    pi, half_pi, inverse_pi = 3.141592653589793, 1.5707963267948966, 0.3183098861837907
    is_label = torch.arange(loc.shape[1], dtype=torch.int32, device=loc.device) == labels[:, None]
    smallest = torch.finfo(loc.dtype).tiny
    d, s = torch.where(is_label, -loc, loc), scale.clamp(min=smallest)  # (n, v)

    # Everything relative to the larger of |d| and s, so that no square overflows.
    size = d.abs()
    largest = torch.maximum(s, size)
    unit = 1 / largest
    s_unit, d_unit = s * unit, d * unit
    ratio = torch.minimum(s_unit, d_unit.abs())  # in [0, 1]
    angle = arctangent(ratio)
    smaller_tail = torch.where(s > size, half_pi - angle, angle)  # atan2(s, |d|), at most π/2
    theta = torch.where(d > 0, smaller_tail, pi - smaller_tail)
    # An angle below the smallest normal number has no digits left; the arc tends to the scale there.
    arc = torch.where(theta < smallest, s, largest * theta)
    # A point mass (a row of zeros in W) has no slope, and must not poison the others.
    slope = torch.where(scale < smallest, 0.0, importance / ((1 + ratio * ratio) * arc))

    loss.add_(minus_log(smaller_tail * inverse_pi, d > 0) * importance)
    slope_d = torch.minimum(s_unit * slope, steepest)
    loc.copy_(torch.where(is_label, -slope_d, slope_d))
    scale.copy_(-d_unit * slope)


def _plain_tail(*block: Tensor) -> None:
    _tail_formula(torch.atan, _minus_log, *block)


def _fast_tail(*block: Tensor) -> None:
    _tail_formula(_fast_arctangent, _fast_minus_log, *block)


def _minus_log(share: Tensor, is_smaller: Tensor) -> Tensor:
    """−log P where P is the smaller tail, share in (0, ½], and −log(1 − share) where it is the larger one."""
    smallest = torch.finfo(share.dtype).tiny
    return -torch.where(is_smaller, share.clamp(min=smallest).log(), torch.log1p(-share))


def _fast_arctangent(ratio: Tensor) -> Tensor:
    """Atan on [0, 1], a minimax polynomial: relative error 1.5e-8 before float32 rounds."""
    z = ratio * ratio
    p = 0.002849891229 * z - 0.01606863566
    p = p * z + 0.04269153059
    p = p * z - 0.07504295536
    p = p * z + 0.1064093451
    p = p * z - 0.142036446
    p = p * z + 0.1999261941
    p = p * z - 0.3333307335
    p = p * z + 0.9999999848
    return p * ratio


def _fast_minus_log(share: Tensor, is_smaller: Tensor) -> Tensor:
    """`_minus_log` by one artanh on [0, ⅓], a minimax polynomial: relative error 4e-9 before float32 rounds.

    −log(1 − share) = 2 artanh(share/(2 − share)), and with share = m·2^e, 1 ≤ m < 2,
    −log(share) = −e·log 2 − 2 artanh((m − 1)/(m + 1)).
    """
    bits = share.view(torch.int32)
    exponent = ((bits >> 23) - 127).to(torch.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    t = torch.where(is_smaller, mantissa - 1, share) / torch.where(is_smaller, mantissa + 1, 2 - share)
    z = t * t
    p = 0.2817833508 * z + 0.2796060275
    p = p * z + 0.4002491028
    p = p * z + 0.6666631468
    p = p * z + 2.000000008
    twice_artanh = p * t
    return torch.where(is_smaller, -0.6931471805599453 * exponent - twice_artanh, twice_artanh)


_tail = CompiledKernel(_fast_tail, _plain_tail)
