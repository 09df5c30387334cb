"""W x for a few vectors from one read of W, in float32, float16, bfloat16 or bytes.

A decoding step is bound by reading weights. A library product of one row leaves half of the memory bandwidth
unused; native code does not, and widens the weights on the way.
This module knows neither layers nor tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.native import native_matrix, native_product, runs_native

__all__ = [
    "LARGEST_PASS",
    "PASS_SIZES",
    "SMALLEST_COMPILED",
    "Matrix",
    "dense_products",
    "products",
]

# Vectors that one pass over W carries; other counts are padded up to the next. Beyond, matrix products win.
PASS_SIZES = (1, 2, 4, 8)
LARGEST_PASS = PASS_SIZES[-1]
# A matrix of fewer elements is read in little time: not worth a compiler.
SMALLEST_COMPILED = 1 << 24
# Rows of W that exist widened at one time, where a product needs them so.
BLOCK_ROWS = 8192


class Matrix(NamedTuple):
    """W (V, D): floats, or bytes by groups g of 32 columns i, W = scale[v, g]·W8 + shift[v, g].

    Bytes are kept four to a 32-bit word, because compilers load and widen words well: word j of a group holds
    its columns j, j + 8, j + 16 and j + 24, so that eight words give four runs of eight columns.

    Args:
        weight: (V, D) floats, or (V, D/4) words, whose type is float32 because compilers load that best.
        scale: (V, D/32) float32 with bytes, else None.
        shift: (V, D/32) float32, or None for 0.
    """

    weight: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    @classmethod
    def from_bytes(cls, levels: Tensor, scale: Tensor, shift: Tensor | None = None) -> Matrix:
        """W from ``levels`` (V, D/32, 32), int8, and the scales and shifts (V, D/32) of the groups."""
        runs = levels.unflatten(-1, (4, 8)).transpose(-1, -2).contiguous()  # (V, G, 8, 4)
        return cls(runs.view(torch.float32).flatten(1), scale, shift)

    @property
    def columns(self) -> int:
        """D."""
        return self.weight.shape[1] * (1 if self.scale is None else 4)

    @property
    def size(self) -> int:
        """V · D."""
        return self.weight.shape[0] * self.columns

    def rows(self, chosen: Tensor | slice) -> Matrix:
        """Some rows; views where they are a slice."""
        scale = None if self.scale is None else self.scale[chosen]
        return Matrix(self.weight[chosen], scale, None if self.shift is None else self.shift[chosen])

    def runs(self) -> list[Tensor]:
        """W without scale and shift, float32: one (V, 1, D), or for bytes four (V, D/32, 8).

        Inside a compiled loop they are never stored.
        """
        if self.scale is None:
            return [self.weight.unsqueeze(1).to(torch.float32)]
        words = self.weight.view(torch.int32).unflatten(-1, (-1, 8))  # (V, G, 8)
        raised = [words << 24, words << 16, words << 8, words]  # each byte at the top, its sign with it
        return [(word >> 24).to(torch.float32) for word in raised]

    def wide_runs(self) -> list[Tensor]:
        """`runs` with scale and shift."""
        runs = self.runs()
        if self.scale is not None:
            runs = [run * self.scale.unsqueeze(-1) for run in runs]
        return runs if self.shift is None else [run + self.shift.unsqueeze(-1) for run in runs]

    def split(self, x: Tensor) -> list[Tensor]:
        """The parts of vectors (N, D) that meet each of `runs`: (N, 1, D), or four (N, D/32, 8)."""
        return [x.unsqueeze(1)] if self.scale is None else list(x.unflatten(-1, (-1, 4, 8)).unbind(2))

    def dense(self) -> Tensor:
        """W in float32 (float64 stays), (V, D)."""
        if self.scale is not None:
            return torch.stack(self.wide_runs(), 2).flatten(1)
        return self.weight if self.weight.dtype == torch.float64 else self.weight.float()


def dense_products(x: Tensor, matrix: Matrix) -> Tensor:
    """`row_products` by matrix products, for any N and without a compiler."""
    vocab = matrix.weight.shape[0]
    if matrix.scale is None and matrix.weight.dtype == x.dtype:
        return F.linear(x, matrix.weight)
    blocks = (matrix.rows(slice(first, first + BLOCK_ROWS)) for first in range(0, vocab, BLOCK_ROWS))
    pieces = [F.linear(x, block.dense().to(x.dtype)) for block in blocks]
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


def products(x: Tensor, matrix: Matrix) -> Tensor:
    """W x, (N, V) in the dtype of ``x``, by whichever form is fast here; without gradients.

    Args:
        x: (N, D), float32 or float64.
        matrix: W, (V, D).
    """
    with torch.no_grad():
        x, matrix = x.detach(), matrix._replace(weight=matrix.weight.detach())
        few = 0 < x.shape[0] <= LARGEST_PASS and x.dtype == torch.float32
        if few and not torch.compiler.is_compiling() and runs_native(matrix.weight, matrix.scale):
            return native_product(x, native_matrix(*matrix))
        return dense_products(x, matrix)
