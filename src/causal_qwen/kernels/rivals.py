"""Which words stand highest beside a label: one product over W, and no (N, V) tensor at once.

This module does not know what the words are compared for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["rivals_of"]

BLOCK_ELEMENTS = 1 << 21  # of a block of (positions, V) scores


@torch.no_grad()
def rivals_of(loc_U: Tensor, weight: Tensor, labels: Tensor, *, offset: Tensor, count: int) -> Tensor:
    """(N, 1 + K) the label, and the K other words with the largest W·loc_U + offset.

    Args:
        loc_U: (N, D).
        weight: (V, D) W.
        labels: (N,) token ids.
        offset: (V,) b − C.
        count: K; a vocabulary with fewer other words gives all of them.
    """
    vocab_size = len(weight)
    words = [labels.new_empty(0, 1 + min(count, vocab_size - 1))]
    blocks = (column.split(max(BLOCK_ELEMENTS // vocab_size, 1)) for column in (loc_U, labels[:, None]))
    for causes, label in zip(*blocks, strict=True):
        height = torch.nn.functional.linear(causes, weight.to(causes.dtype), offset)  # (n, V)
        height.scatter_(1, label, -math.inf)
        words.append(torch.cat([label, height.topk(words[0].shape[1] - 1).indices], 1))
    return torch.cat(words)
