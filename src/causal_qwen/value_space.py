"""Value space: where the number head works, g(value) standardised, and the way back.

g is monotone, so medians and quantiles map back exactly. This module knows nothing of text, heads or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ValueSpace", "signed_log1p"]


def signed_log1p(value: Tensor) -> Tensor:
    """sign(v)·ln(1 + |v|)."""
    return torch.copysign(torch.log1p(value.abs()), value)


@dataclass(frozen=True, slots=True)
class ValueSpace:
    """y = (g(v) − center)/spread, with g(v) = sign(v)·ln(1 + |v|) ("log") or g(v) = v ("linear").

    Args:
        kind: "log" gives equal relative precision at every magnitude, "linear" is the original formulation.
        center: Median of g over the training numbers.
        spread: Half the interquartile range of g over the training numbers, > 0.
    """

    kind: Literal["log", "linear"] = "log"
    center: float = 0.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("log", "linear"):
            raise ValueError(f"value_space is {self.kind!r}; choose 'log' or 'linear'")
        if not math.isfinite(self.center):
            raise ValueError(f"value_center is {self.center!r}; it must be a finite number")
        if not (math.isfinite(self.spread) and self.spread > 0):
            raise ValueError(f"value_spread is {self.spread!r}; it must be a finite number above 0")

    def encode(self, value: Tensor) -> Tensor:
        """g(v), standardised; in the dtype of ``value`` (float64 keeps every digit of a large number)."""
        g = signed_log1p(value) if self.kind == "log" else value
        largest = torch.finfo(g.dtype).max
        return ((g - self.center) / self.spread).clamp(-largest, largest)

    def decode(self, y: Tensor) -> Tensor:
        """g⁻¹(center + spread·y) in float64, saturating at the largest float instead of overflowing."""
        g = y.double() * self.spread + self.center
        value = torch.copysign(torch.expm1(g.abs()), g) if self.kind == "log" else g
        largest = torch.finfo(value.dtype).max
        return value.clamp(-largest, largest)

    @classmethod
    def fit(cls, kind: Literal["log", "linear"], values: Tensor) -> ValueSpace:
        """The space whose center and spread are the median and half the interquartile range of g(values).

        Half the interquartile range is 0 when most values are equal; the spread is then half the full range,
        and 1 when all of them are.

        Raises:
            ValueError: If ``values`` is empty or holds a NaN or an infinity.
        """
        if values.numel() == 0:
            raise ValueError("no values: a value space is fitted to at least one number")
        if not torch.isfinite(values).all():
            bad = values[~torch.isfinite(values)][0].item()
            raise ValueError(f"{bad!r} among the values; a value space is fitted to finite numbers")
        g = cls(kind).encode(values.double().flatten())
        low, median, high = g.quantile(
            torch.tensor([0.25, 0.5, 0.75], dtype=g.dtype, device=g.device)
        ).tolist()
        spread = (high - low) / 2 or (g.max() - g.min()).item() / 2 or 1.0
        return cls(kind, median, spread)
