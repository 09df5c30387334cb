"""A number of which a part is kept and the rest is drawn anew: the law, in closed form.

A residual r = A + B is observed, A ~ Cauchy(0, a) the individual's and B ~ Cauchy(0, b) not. In another world
the number is loc + s·A + B', with B' ~ Cauchy(0, b') new. Given r, the density of A is rational with two
poles above the real line, ia and r + ib. Stretching moves them, and adding a Cauchy lifts them:

    density of loc + s·A + B' at y:  2 Re Σ_k c_k/(y − q_k),  q = loc + s·(pole) + i·b'

so that the distribution function is a sum of logarithms and angles. This module knows torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RedrawnLaw"]

# Relative distance below which two poles are told apart, by widening the individual's part that much.
NEAREST_POLES = 1e-3
NARROWEST = 1e-9  # of a part, relative to both
BISECTIONS = 60


@dataclass(frozen=True, slots=True, eq=False)
class RedrawnLaw:
    """y ~ loc + s·A + B' given A + B = r.

    Args:
        residues: (..., 2) c_k, complex128.
        poles: (..., 2) q_k, complex128, above the real line.
    """

    residues: Tensor
    poles: Tensor

    @classmethod
    def of(
        cls, residual: Tensor, kept: Tensor, lost: Tensor, loc: Tensor, ratio: Tensor, new: Tensor
    ) -> RedrawnLaw:
        """The law in another world.

        Args:
            residual: (...) r.
            kept: (...) a ≥ 0, scale of the individual's part.
            lost: (...) b ≥ 0, scale of the part that is drawn anew; not 0 with ``kept``.
            loc: (...) of the number in the other world.
            ratio: (...) s > 0, what the individual's part is multiplied by there.
            new: (...) b' ≥ 0.
        """
        r, a, b, loc, ratio, new = (part.double() for part in (residual, kept, lost, loc, ratio, new))
        total = a + b
        a, b = a.clamp(min=NARROWEST * total), b.clamp(min=NARROWEST * total)
        close = torch.hypot(r, a - b) < NEAREST_POLES * total
        a = torch.where(close, a * (1 + 2 * NEAREST_POLES), a)
        first, second = torch.complex(torch.zeros_like(a), a), torch.complex(r, b)
        gain = a * b * (r.square() + (a + b).square()) / (torch.pi * (a + b))
        residues = torch.stack(
            [gain / (2 * first * ((first - r) ** 2 + b**2)), gain / (2j * b * (second**2 + a**2))], dim=-1
        )
        poles = torch.stack([first, second], dim=-1) * ratio[..., None]
        return cls(residues, poles + torch.complex(loc, new)[..., None])

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y) = 2 Σ_k Re c_k·log|y − q_k| − Im c_k·angle(q_k − y)."""
        distance = self.poles - y.double()[..., None]
        terms = self.residues.real * distance.abs().log() - self.residues.imag * distance.angle()
        return 2 * terms.sum(-1)

    def quantile(self, prob: float) -> Tensor:
        """The y of P(Y ≤ y) = prob, by bisection in the angle."""
        center = self.poles.real.mean(-1)
        width = self.poles.imag.sum(-1) + (self.poles.real[..., 1] - self.poles.real[..., 0]).abs()
        low, high = torch.zeros_like(center), torch.ones_like(center)

        def at(share: Tensor) -> Tensor:
            return center + width * torch.tan(torch.pi * (share - 0.5))

        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = self.cdf(at(middle)) < prob
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return at((low + high) / 2)
