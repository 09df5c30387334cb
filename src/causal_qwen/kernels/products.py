"""W x for a few vectors from one read of W, in float32, float16, bfloat16 or bytes.

A decoding step is bound by reading weights. A library product of one row leaves half of the memory bandwidth
unused; row sums that a compiler turns into one loop do not, and there the weights are widened on the way.
This module knows neither layers nor tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.compiled import CompiledKernel

__all__ = [
    "LARGEST_PASS",
    "PASS_SIZES",
    "SMALLEST_COMPILED",
    "Matrix",
    "dense_products",
    "products",
    "row_products",
]

# Vectors that one pass over W carries; other counts are padded up to the next. Beyond, matrix products win.
PASS_SIZES = (1, 2, 4, 8)
LARGEST_PASS = PASS_SIZES[-1]
# A matrix of fewer elements is read in little time: not worth a compiler.
SMALLEST_COMPILED = 1 << 24
# Parts of a row of 16-bit floats that are summed side by side.
PARTS = 4
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


def row_products(x: Tensor, matrix: Matrix) -> Tensor:
    """W x as row sums, (N, V): to be compiled, where it becomes one loop over W.

    Args:
        x: (N, D), float32; N is small.
        matrix: W, (V, D).
    """
    if matrix.scale is None:
        return torch.stack([_float_sums(vector, matrix.weight, len(x)) for vector in x])
    runs, vectors = matrix.runs(), matrix.split(x)
    total = x.unflatten(-1, (-1, 4, 8)).sum(2)  # (N, G, 8): what a shift meets
    sums = []
    for i in range(len(x)):
        term = _added([run * vector[i] for run, vector in zip(runs, vectors, strict=True)])  # (V, G, 8)
        term = term * matrix.scale.unsqueeze(-1)
        if matrix.shift is not None:
            term = term + matrix.shift.unsqueeze(-1) * total[i]
        sums.append(term.sum((-2, -1)))
    return torch.stack(sums)


def _float_sums(vector: Tensor, weight: Tensor, count: int) -> Tensor:
    """W x for one x (D,) of ``count``, as sums side by side: a single one waits for its own additions."""
    parts = 1 if weight.itemsize >= 4 else max(PARTS // count, 1)
    parts = parts if len(vector) % (8 * parts) == 0 else 1
    pieces = zip(weight.chunk(parts, -1), vector.chunk(parts), strict=True)
    return _added([(columns.to(torch.float32) * piece).sum(-1) for columns, piece in pieces])


def _added(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


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
    count = x.shape[0]
    with torch.no_grad():
        x, matrix = x.detach(), matrix._replace(weight=matrix.weight.detach())
        small = matrix.size < SMALLEST_COMPILED or x.dtype != torch.float32
        if small or torch.compiler.is_compiling() or not 0 < count <= LARGEST_PASS:
            return dense_products(x, matrix)
        padding = min(size for size in PASS_SIZES if size >= count) - count
        # A copy, so that tensors made in inference mode do not compile a variant of their own.
        with torch.inference_mode(False):
            x = F.pad(x, (0, 0, 0, padding)) if padding else x.clone()
            return _one_pass(x, matrix)[:count]


_one_pass = CompiledKernel(row_products, dense_products, dynamic=False)
