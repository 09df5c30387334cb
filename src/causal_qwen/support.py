"""What a solved number head has seen: how far a cause lies from those it was solved on.

The leverage of features x in a ridge regression, h(x) = (x − x̄)ᵀ(XᵀX + λ)⁻¹(x − x̄), is how much the fit would
have to invent to answer there. It is kept as the leading directions of the training features and one number
for all others, since those were not seen at all. A ridge may have a matrix beside λ, such as what rounding
changes in features; it counts as seen, beside XᵀX. The same matrix says how well the slope is known, and so
the difference of what is predicted in two places. This module knows torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["MOST_DIRECTIONS", "NumberSupport"]

MOST_DIRECTIONS = 256


class NumberSupport(nn.Module):
    """Leverage of a cause, relative to the largest that training has seen of a row left out.

    Args:
        size: D.
        rank: R, directions that are kept; 0 where no head was solved.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__()
        shapes = {"center": (size,), "directions": (rank, size), "gains": (rank,), "rest": ()}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float32), persistent=rank > 0)
        self.center: Tensor  # (D,) x̄
        self.directions: Tensor  # (R, D), orthonormal
        self.gains: Tensor  # (R,) what a unit along each adds to the relative leverage
        self.rest: Tensor  # what a unit off all of them adds

    @property
    def is_known(self) -> bool:
        """Whether a head was solved."""
        return len(self.gains) > 0

    def forward(self, loc_U: Tensor) -> Tensor:
        """Relative leverage (...) of causes (..., D): above 1 lies beyond what training has seen."""
        offset = loc_U.float() - self.center.float()
        along = offset @ self.directions.float().T  # (..., R)
        off = offset - along @ self.directions.float()
        return (along.square() * self.gains.float()).sum(-1) + self.rest.float() * off.square().sum(-1)

    def coordinates(self, loc_U: Tensor, largest: float) -> Tensor:
        """M^(−½)·loc_U (..., D), float32, with M = ½XᵀX + λ: distances are what a slope leaves unknown.

        Given the rows, and a normal prior of variance β²/λ, which is what a ridge is, the slope of a Cauchy
        regression with scale β has the covariance β²M⁻¹ (a row's information about its location is
        1/(2β²)). So the squared distance of two places is the variance of what the slope makes of their
        difference, in units of β²; of what the prior alone speaks for, all of it.

        Args:
            loc_U: Causes (..., D).
            largest: The leverage that `of` has divided by.
        """
        x, directions = loc_U.float(), self.directions.float()
        gains, rest = self.gains.float(), self.rest.float()
        known = (largest * 2 * gains * rest / (gains + rest)).sqrt()  # (R,) of 1/(½v + λ)
        unknown = (largest * rest).sqrt()
        return unknown * x + ((known - unknown) * (x @ directions.T)) @ directions

    @classmethod
    @torch.no_grad()
    def of(
        cls, features: Tensor, ridge: float, *, noise: Tensor | None = None
    ) -> tuple[NumberSupport, float]:
        """The support of training features (N, D) under a ridge, and the leverage that it is relative to.

        A row's left-out leverage is h/(1 − h). A new row of the same kind exceeds the largest of N of them
        with probability 1/(N + 1).

        Args:
            features: Of the rows that a head was solved on.
            ridge: λ, the same in every direction.
            noise: (D, D) what the ridge has beside λ.
        """
        x = features.double()
        center = x.mean(0)
        x = x - center
        scatter = x.T @ x if noise is None else x.T @ x + noise
        values, vectors = torch.linalg.eigh(scatter)
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        rank = max(min(MOST_DIRECTIONS, int((values > 0.1 * ridge).sum())), 1)
        support = cls(x.shape[1], rank).to(features.device)
        support.center.copy_(center)
        support.directions.copy_(vectors[:, :rank].T)
        support.gains.copy_(1 / (values[:rank] + ridge))
        support.rest.fill_(1 / ridge)
        leverage = torch.cat([support(block).double() for block in features.split(8192)]) + 1 / len(x)
        largest = (leverage / (1 - leverage).clamp(min=1e-3)).max()
        support.gains.div_(largest)
        support.rest.div_(largest)
        return support, float(largest)
