"""The law: independent Cauchy variables as values.

A Cauchy has no mean and no variance, so nothing here reports either. Every probability goes through the
two-argument arctangent, which is exact in both tails, and every function is differentiable with closed-form
gradients that neither overflow nor vanish before their float does.

This module knows torch and nothing else: no model, no vocabulary, no generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["Cauchy", "central_multiple", "log_tail", "magnitude", "standard_draw", "truncation_bound"]


@dataclass(frozen=True, slots=True, eq=False)
class Cauchy:
    """X ~ Cauchy(loc, scale), one independent variable per element.

    Args:
        loc: Median of X, any shape, float32 or wider.
        scale: Half the interquartile range, > 0 (0 is a point mass: draws and quantiles stay exact),
            broadcastable to ``loc``.
    """

    loc: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        for name, value in (("loc", self.loc), ("scale", self.scale)):
            if value.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"Cauchy {name} is {value.dtype}; the tails need float32 or float64: call .float() first"
                )

    def __getitem__(self, index: Any) -> Cauchy:
        """The same law at some of its elements."""
        return Cauchy(self.loc[index], self.scale[index])

    def to(self, *options: Any) -> Cauchy:
        """The same law in another dtype or on another device, as in `Tensor.to`."""
        return Cauchy(self.loc.to(*options), self.scale.to(*options))

    @classmethod
    def cat(cls, laws: Sequence[Cauchy]) -> Cauchy:
        """One after another, along the first dimension."""
        return cls(torch.cat([law.loc for law in laws]), torch.cat([law.scale for law in laws]))

    def held(self, where: Tensor) -> Cauchy:
        """The same law, with no gradient to the elements that ``where`` marks."""
        loc, scale = (torch.where(where, tensor.detach(), tensor) for tensor in (self.loc, self.scale))
        return Cauchy(loc, scale)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Cauchy:
        """W·X + b ~ Cauchy(W·loc + b, |W|·scale), the sum of independent dimensions.

        Args:
            weight: (K, D) against ``loc`` (..., D).
            bias: (K,).
        """
        loc = torch.nn.functional.linear(self.loc, weight, bias)  # (..., K)
        scale = torch.nn.functional.linear(self.scale, weight.abs())  # (..., K)
        return Cauchy(loc, scale)

    def log_prob(self, value: Tensor) -> Tensor:
        """log density: −log(π·scale) − log(1 + z²), z = (value − loc)/scale, without forming z² where it
        overflows.
        """
        return -(math.pi * self.scale).log() - _log1p_square((value - self.loc) / self.scale)

    def cdf(self, value: Tensor) -> Tensor:
        """P(X ≤ value) = atan2(scale, loc − value)/π."""
        return torch.atan2(self.scale, self.loc - value) / math.pi

    def sf(self, value: Tensor) -> Tensor:
        """P(X > value) = atan2(scale, value − loc)/π."""
        return torch.atan2(self.scale, value - self.loc) / math.pi

    def log_cdf(self, value: Tensor) -> Tensor:
        """log P(X ≤ value), exact in both tails."""
        return log_tail(self.loc - value, self.scale)

    def log_sf(self, value: Tensor) -> Tensor:
        """log P(X > value), exact in both tails."""
        return log_tail(value - self.loc, self.scale)

    def quantile(self, prob: Tensor | float) -> Tensor:
        """loc + scale·tan(π(prob − ½)), by the cotangent towards each end so that no digit of prob is
        lost.
        """
        prob = torch.as_tensor(prob, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * _standard_quantile(prob)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval of probability ``level``: loc ∓ scale·tan(π·level/2).

        Raises:
            ValueError: If ``level`` is not inside (0, 1).
        """
        half_width = self.scale * central_multiple(level)
        return self.loc - half_width, self.loc + half_width

    def crps(self, value: Tensor) -> Tensor:
        """Continuous ranked probability score, scale·(2/π)·(z·atan z − ½ log(1 + z²) + log 2)."""
        z = (value - self.loc) / self.scale
        return self.scale * (2 / math.pi) * (z * torch.atan(z) - _log1p_square(z) / 2 + math.log(2))

    def rsample(
        self,
        *,
        uniform: Tensor | None = None,
        generator: torch.Generator | None = None,
        density_floor: float = 0.0,
    ) -> Tensor:
        """loc + scale·ε, differentiable in loc and scale.

        Args:
            uniform: Draws from [0, 1), of the shape wanted (broadcastable with ``loc``). Drawn here when
                None.
            generator: Source of ``uniform`` when it is None.
            density_floor: Keep only ε whose density is at least this share of the peak (0 keeps all).
        """
        if uniform is None:
            shape = torch.broadcast_shapes(self.loc.shape, self.scale.shape)
            uniform = torch.rand(shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * standard_draw(uniform, density_floor=density_floor)


def central_multiple(level: float) -> float:
    """tan(π·level/2): how many scales the central interval of probability ``level`` reaches to each side.

    Raises:
        ValueError: If ``level`` is not inside (0, 1).
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"interval level is {level!r}; it must lie strictly between 0 and 1, such as 0.9")
    return math.tan(math.pi * level / 2)


def truncation_bound(density_floor: float) -> float:
    """The largest |ε| whose density is ``density_floor`` times the peak: √(1/floor − 1), ∞ at floor 0.

    Raises:
        ValueError: If ``density_floor`` is outside [0, 1).
    """
    if not 0.0 <= density_floor < 1.0:
        raise ValueError(
            f"density_floor is {density_floor!r}; it must lie in [0, 1): 0 keeps every draw, 0.01 is usual"
        )
    return math.inf if density_floor == 0.0 else math.sqrt(1.0 / density_floor - 1.0)


def standard_draw(uniform: Tensor, *, density_floor: float = 0.0) -> Tensor:
    """ε = tan(a(2r − 1)) with a = atan(bound): the standard Cauchy truncated at ``density_floor``, by
    inversion.

    Args:
        uniform: r in [0, 1), any shape.
        density_floor: 0 is the untruncated law.
    """
    bound = truncation_bound(density_floor)
    if bound == math.inf:
        # r = 0 is the pole itself; half the spacing of torch.rand keeps the draw finite and its rank
        # unchanged.
        spacing = torch.finfo(uniform.dtype).eps / 4
        return _standard_quantile(uniform.clamp(min=spacing, max=1 - spacing * 2))
    # The endpoints are tan(±a), which rounding could push past the bound.
    return torch.tan(math.atan(bound) * (2 * uniform - 1)).clamp(-bound, bound)


def magnitude(parameter: Tensor) -> Tensor:
    """|parameter|, with slope 1 at 0.

    torch.abs has slope 0 there, so a non-negative quantity that starts at 0 (a noise not yet learned) would
    never move.
    """
    return torch.where(parameter < 0, -parameter, parameter) if torch.is_grad_enabled() else parameter.abs()


def log_tail(distance: Tensor, scale: Tensor) -> Tensor:
    """log P(X > loc + distance) = log(atan2(scale, distance)/π) for X ~ Cauchy(loc, scale).

    Below the median it is log1p of the small opposite tail, so that values near 0 keep their digits.
    """
    return _LogTail.apply(*torch.broadcast_tensors(distance, scale))  # type: ignore[no-any-return]


class _LogTail(torch.autograd.Function):
    """log_tail with gradients by the angle θ = atan2(scale, distance), the radius h and the arc h·θ.

    ∂/∂distance = −(scale/(h·θ))/h and ∂/∂scale = (distance/h)/(h·θ). No square is ever formed, so 1e30 does
    not overflow, where autograd through atan2 divides by scale² + distance².
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(distance: Tensor, scale: Tensor) -> Tensor:
        far_tail = torch.atan2(scale, distance.abs()) / math.pi  # at most ½, all its digits significant
        smallest = torch.finfo(far_tail.dtype).tiny  # a scale of 0 gives −87 in float32, not −∞
        return torch.where(distance > 0, far_tail.clamp(min=smallest).log(), torch.log1p(-far_tail))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grad_outputs
        distance, scale = ctx.saved_tensors
        theta = torch.atan2(scale, distance)
        radius = torch.hypot(scale, distance)
        # The arc tends to the scale as the angle vanishes; an angle below the smallest normal number has no
        # digits left.
        smallest = torch.finfo(theta.dtype).tiny
        arc = torch.where(theta < smallest, scale, radius * theta)
        # A point mass (scale 0) has no slope: a vocabulary row of zeros must not poison the others.
        grad = torch.where(scale < smallest, 0.0, grad)
        arc, radius = arc.clamp(min=smallest), radius.clamp(min=smallest)
        grad_distance = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_distance = -grad * (scale / arc) / radius
        if ctx.needs_input_grad[1]:
            grad_scale = grad * (distance / radius) / arc
        return grad_distance, grad_scale


def _log1p_square(z: Tensor) -> Tensor:
    """log(1 + z²), as 2 log|z| + log(1 + z⁻²) beyond 1 so that z² never overflows."""
    far = z.abs() > 1
    near_z = torch.where(far, 0.0, z)
    far_z = torch.where(far, z, 1.0).abs()
    return torch.where(
        far, 2 * far_z.log() + torch.log1p(far_z.reciprocal().square()), torch.log1p(near_z.square())
    )


def _standard_quantile(prob: Tensor) -> Tensor:
    """tan(π(prob − ½)): −cot(π·prob) below ¼ and cot(π(1 − prob)) above ¾, where the tangent would cancel."""
    low, high = prob < 0.25, prob > 0.75
    middle = torch.tan(math.pi * (torch.where(low | high, 0.5, prob) - 0.5))
    tail = torch.where(low, prob, torch.where(high, 1 - prob, 0.25))
    cotangent = torch.tan(math.pi * tail).reciprocal()
    return torch.where(low, -cotangent, torch.where(high, cotangent, middle))
