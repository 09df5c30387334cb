"""Which tokens stand for the whole vocabulary when the One-vs-Rest sum is estimated.

Some tokens are certain: they count as they are. The others are drawn, each π times in expectation, and each
time it is drawn a token stands for 1/π tokens. E[count]/π = 1, so the weighted sum over the drawn ones has
the full sum as its expectation, and so has its gradient. This module does not know scores or losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw_candidates"]


def draw_candidates(
    certain: Tensor, vocab_size: int, num_negatives: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens, and how many each stands for: 1 where certain, count/π where drawn, π = m/(V − A).

    The draw is stratified: the tokens that are not certain, in token order, fill [0, m) with π each, and one
    point falls uniformly into each unit of it. With m at least the rest of the vocabulary nothing is left to
    chance. The variance is never above that of m independent draws, equals that of drawing without
    replacement where token order says nothing, and is lower where neighbours are alike, as in a vocabulary by
    frequency.

    Args:
        certain: (A,) distinct token ids.
        vocab_size: V.
        num_negatives: m ≥ 1, how many tokens are drawn.
        generator: Source of the draw; None is torch's default.

    Returns:
        Token ids (K,), distinct and beginning with ``certain``, and their importance (K,) in float64.
    """
    is_certain = torch.zeros(vocab_size, dtype=torch.bool, device=certain.device)
    is_certain[certain] = True
    rest = (~is_certain).nonzero().squeeze(1)  # (V − A,)
    if num_negatives >= len(rest):
        tokens = torch.cat([certain, rest])
        return tokens, torch.ones_like(tokens, dtype=torch.float64)
    device = certain.device if generator is None else generator.device
    inside = torch.rand(num_negatives, dtype=torch.float64, device=device, generator=generator)
    per_draw = len(rest) / num_negatives  # 1/π
    points = (torch.arange(num_negatives, device=device) + inside) * per_draw  # in [0, V − A)
    # Rounding may put the last point behind the last token.
    places, counts = points.long().clamp(max=len(rest) - 1).to(rest.device).unique(return_counts=True)
    tokens = torch.cat([certain, rest[places]])
    importance = torch.cat([torch.ones_like(certain, dtype=torch.float64), counts * per_draw])
    return tokens, importance
