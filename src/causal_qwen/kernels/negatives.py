"""Which tokens stand for the whole vocabulary when the One-vs-Rest sum is estimated.

Some tokens are certain: they count as they are. The others are drawn, token k π_k times in expectation, and
each time it is drawn it stands for 1/π_k tokens. E[count_k]/π_k = 1, so the weighted sum over the drawn ones
has the full sum as its expectation, and so has its gradient. This module does not know scores or losses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Proposal", "draw_candidates", "proposal_weights"]

Proposal = Literal["uniform", "unigram"]


def proposal_weights(
    proposal: Proposal,
    vocab_size: int,
    *,
    token_counts: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """q_k, up to a factor: 1 ("uniform"), or ½/V + ½·count_k/Σcount ("unigram").

    The uniform half bounds the importance of a token that the counts miss: twice that under "uniform".

    Args:
        proposal: "uniform" or "unigram".
        vocab_size: V.
        token_counts: (V,) how often each token occurs in training text, for "unigram".
        device: Where the weights live.

    Returns:
        (V,) in float64, all > 0.

    Raises:
        ValueError: If the proposal is unknown, or its counts are missing or unusable.
    """
    if proposal == "uniform":
        return torch.ones(vocab_size, dtype=torch.float64, device=device)
    if proposal != "unigram":
        raise ValueError(f"proposal is {proposal!r}; choose 'uniform' or 'unigram'")
    if token_counts is None:
        raise ValueError("proposal='unigram' needs token_counts: (V,) occurrences in training text")
    counts = token_counts.to(device=device, dtype=torch.float64)
    if counts.shape != (vocab_size,):
        raise ValueError(f"token_counts has shape {tuple(counts.shape)}; it must be ({vocab_size},)")
    total = counts.sum()
    if not (torch.isfinite(total) and total > 0 and (counts >= 0).all()):
        raise ValueError(f"token_counts sum to {total.item()}; they must be finite, ≥ 0 and not all 0")
    return 0.5 / vocab_size + 0.5 * counts / total


def draw_candidates(
    certain: Tensor, weights: Tensor, num_negatives: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens, and how many each stands for: 1 where certain, count_k/π_k where drawn, π_k = m·q_k/Σq.

    The draw is stratified: the π_k, laid side by side in token order, fill [0, m), and one point falls
    uniformly into each unit of it, so that a token of length π_k < 1 expects π_k points. Tokens whose π_k
    reaches 1 become certain; with m at least the rest of the vocabulary nothing is left to chance. The
    variance is never above that of m independent draws, equals that of drawing without replacement where
    token order says nothing, and is lower where neighbours are alike, as in a vocabulary by frequency.

    Args:
        certain: (A,) distinct token ids.
        weights: (V,) q > 0, float64.
        num_negatives: m ≥ 1, how many tokens are drawn.
        generator: Source of the draw; None is torch's default.

    Returns:
        Token ids (K,), distinct and beginning with ``certain``, and their importance (K,) in float64.
    """
    expected = weights.index_fill(0, certain, 0.0)  # (V,), becomes π
    promoted = torch.zeros_like(expected, dtype=torch.bool)
    number = num_negatives
    while (open_tokens := expected > 0).any():
        expected = expected * (number / expected.sum())
        surely = open_tokens if number >= open_tokens.sum() else expected >= 1
        if not surely.any():
            break
        promoted |= surely
        number -= int(surely.sum())
        expected = torch.where(surely, 0.0, expected)

    drawn, counts = _stratified_draw(expected, number, generator=generator)
    ids = torch.cat([certain, promoted.nonzero().squeeze(1), drawn])
    importance = torch.ones_like(ids, dtype=torch.float64)
    importance[len(ids) - len(drawn) :] = counts / expected[drawn]
    return ids, importance


def _stratified_draw(
    expected: Tensor, number: int, *, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """One point in each unit of [0, number): the distinct tokens hit, and how often each."""
    open_tokens = expected.nonzero()
    if not len(open_tokens):
        return open_tokens.new_empty(0), open_tokens.new_empty(0)
    device = expected.device if generator is None else generator.device
    inside = torch.rand(number, dtype=torch.float64, device=device, generator=generator)
    points = (torch.arange(number, device=device) + inside).to(expected.device)
    hits = torch.searchsorted(expected.cumsum(0), points, right=True)
    # Rounding may leave the last point behind the last token that can be drawn.
    drawn, counts = torch.unique(hits.clamp(max=int(open_tokens[-1])), return_counts=True)
    return drawn, counts
