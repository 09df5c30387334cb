"""W x for a few vectors from one read of W, in floats, or in integers of 8 or 4 bits.

A decoding step is bound by reading weights. A library product of one row leaves half of the memory bandwidth
unused; native code does not, and widens the weights on the way. This module knows neither layers nor tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.interface import CMatrix
from causal_qwen.kernels.library import loaded
from causal_qwen.kernels.native import GROUP, LARGEST_NATIVE, native_matrix, pointer, runs_native

__all__ = ["Linear", "Matrix", "dense_products"]

# Rows of W that exist widened at one time, where a product needs them so.
BLOCK_ROWS = 8192


class Matrix(NamedTuple):
    """W (V, D): floats, or integers q by groups g of 32 columns, W = scale[v, g]·q + shift[v, g].

    Integers lie in 32-bit words, because they are widened word by word: byte p of word j of a group belongs
    to column j + 8p. Of 4 bits two groups share the words, the first in the lower halves of the bytes.

    Args:
        weight: (V, D) floats, or (V, D/4) or (V, D/8) words (of type float32, though no numbers).
        scale: (V, D/32) float32 of integers, else None.
        shift: (V, D/32) float32, or None for 0.
    """

    weight: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    @classmethod
    def from_levels(cls, levels: Tensor, bits: int, scale: Tensor, shift: Tensor | None = None) -> Matrix:
        """W from whole numbers (V, D/32, 32): −128 to 127 in 8 bits, 0 to 15 in 4."""
        places = levels.to(torch.int8).unflatten(-1, (4, 8)).transpose(-1, -2)  # (V, G, 8 words, 4 bytes)
        if bits == 4:
            places = places[:, 0::2] | places[:, 1::2] << 4  # (V, G/2, 8, 4)
        return cls(places.contiguous().view(torch.float32).flatten(1), scale, shift)

    @property
    def columns(self) -> int:
        """D."""
        return self.weight.shape[1] if self.scale is None else self.scale.shape[1] * GROUP

    def rows(self, chosen: Tensor | slice) -> Matrix:
        """Some rows; views where they are a slice."""
        scale = None if self.scale is None else self.scale[chosen]
        return Matrix(self.weight[chosen], scale, None if self.shift is None else self.shift[chosen])

    def dense(self) -> Tensor:
        """W in float32 (float64 stays), (V, D)."""
        if self.scale is None:
            return self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        if runs_native(self.weight, self.scale):
            values = torch.empty(len(self.weight), self.columns)
            loaded().matrix_widened(native_matrix(*self), pointer(values), torch.get_num_threads())
            return values
        places = self.weight.view(torch.int8).unflatten(-1, (-1, 8, 4))  # words of 4 bytes
        levels = places.transpose(-1, -2).flatten(2)  # (V, G, 32), or (V, G/2, 32) pairs
        if levels.shape[1] < self.scale.shape[1]:
            levels = torch.stack((levels & 15, levels >> 4 & 15), 2).flatten(1, 2)
        wide: Tensor = levels * self.scale.unsqueeze(-1)
        if self.shift is not None:
            wide += self.shift.unsqueeze(-1)
        return wide.flatten(1)


def dense_products(x: Tensor, matrix: Matrix) -> Tensor:
    """W x by matrix products, (..., D) → (..., V), for any number of vectors and without a compiler."""
    vocab = matrix.weight.shape[0]
    if matrix.scale is None and matrix.weight.dtype == x.dtype:
        return F.linear(x, matrix.weight)
    blocks = (matrix.rows(slice(first, first + BLOCK_ROWS)) for first in range(0, vocab, BLOCK_ROWS))
    pieces = [F.linear(x, block.dense().to(x.dtype)) for block in blocks]
    return torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]


class Linear:
    """W x + b for a W that stays: what native code needs to know of it is looked up once. Without gradients.

    Args:
        weight: W, (V, D).
        bias: b, (V,), or None for 0.
    """

    def __init__(self, weight: Tensor | Matrix, bias: Tensor | None = None) -> None:
        matrix = weight if isinstance(weight, Matrix) else Matrix(weight)
        self.matrix = matrix._replace(weight=matrix.weight.detach())
        self.bias = None if bias is None else bias.detach()

    @functools.cached_property
    def native(self) -> CMatrix | None:
        """W and b for native code, where it can read them."""
        if not runs_native(self.matrix.weight, self.matrix.scale):
            return None
        self._native_bias = None if self.bias is None else self.bias.float().contiguous()  # it points there
        return native_matrix(*self.matrix, self._native_bias)

    def native_for(self, x: Tensor) -> CMatrix | None:
        """`native` where it takes these vectors (..., D); a graph that somebody compiles fuses on its own."""
        few = 0 < x.numel() // x.shape[-1] <= LARGEST_NATIVE and x.dtype == torch.float32
        return self.native if few and not torch.compiler.is_compiling() else None

    def __call__(self, x: Tensor) -> Tensor:
        """(N, D), float32 or float64 → (N, V) in its dtype, by whichever form is fast here."""
        if (matrix := self.native_for(x)) is not None:
            return _native_product(matrix, x)
        with torch.no_grad():
            y = dense_products(x, self.matrix)
            return y if self.bias is None else y.add_(self.bias)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W x + b and its argmax, (N, V) and (N,)."""
        if (matrix := self.native_for(x)) is not None:
            best = torch.empty(x.shape[0], dtype=torch.int64)
            return _native_product(matrix, x, best), best
        y = self(x)
        return y, y.argmax(-1)


def _native_product(matrix: CMatrix, x: Tensor, best: Tensor | None = None) -> Tensor:
    """W x + b, (N, V), and in ``best`` its argmax."""
    x, count = x.contiguous(), x.shape[0]
    y = torch.empty(count, matrix.rows)
    places = (pointer(x, (count, matrix.columns)), pointer(y), pointer(best, dtype=torch.int64))
    loaded().matrix_product(matrix, *places, count, torch.get_num_threads())
    return y
