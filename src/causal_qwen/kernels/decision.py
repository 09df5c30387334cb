"""loc_S and scale_S of a few positions from one read of W, and the choice that they make.

Decoding is bound by reading W. loc_S needs W·loc_U and scale_S needs |W|·scale_U, from the same elements: one
pass serves both, and |W| is never stored. This module does not know sampling, processors or what U is.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.native import LARGEST_NATIVE, NativeScorer, native_matrix, runs_native
from causal_qwen.kernels.products import Matrix

__all__ = ["TokenScorer", "token_scores"]

# One thread scores the chosen tokens: they must be few of all.
FEW_OF = 16
# Rows of W whose absolute values exist at one time, where |W| is needed as a matrix: on a CPU they stay in
# its cache, on an accelerator few launches serve all rows.
BLOCK_ROWS = 1024
ACCELERATOR_BLOCK_ROWS = 1 << 15


class TokenScorer:
    """loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean(scale_U) + scale_U0, of a W that
    stays.

    Without gradients. Up to 48 positions take one pass over W in native code; more positions, other devices
    and machines without a compiler go block by block. Both agree with the dense formula to rounding.

    Args:
        weight: (V, D) W, any float dtype, or integers with their scales.
        bias: (V,) b, or None for 0.
        balance: (V,) ≥ 0, or None for 0.
        threshold: (V,) C, or None for 0.
    """

    def __init__(
        self,
        weight: Tensor | Matrix,
        *,
        bias: Tensor | None = None,
        balance: Tensor | None = None,
        threshold: Tensor | None = None,
    ) -> None:
        matrix = weight if isinstance(weight, Matrix) else Matrix(weight)
        self.matrix = matrix._replace(weight=matrix.weight.detach())
        self.bias, self.balance, self.threshold = (
            None if part is None else part.detach() for part in (bias, balance, threshold)
        )

    @functools.cached_property
    def _native(self) -> NativeScorer | None:
        if not runs_native(self.matrix.weight, self.matrix.scale):
            return None
        vectors = (self.bias, self.balance, self.threshold)
        bias, *others = (None if part is None else part.float().contiguous() for part in vectors)
        self._native_bias = bias  # it points there
        return NativeScorer(native_matrix(*self.matrix, bias), *others)

    def _few(self, loc_U: Tensor) -> NativeScorer | None:
        """Native code, where it takes these positions; a graph that somebody compiles fuses on its own."""
        count = loc_U.numel() // loc_U.shape[-1]
        few = 0 < count <= LARGEST_NATIVE and loc_U.dtype == torch.float32
        return self._native if few and not torch.compiler.is_compiling() else None

    def scores(
        self,
        loc_U: Tensor,
        scale_U: Tensor,
        loc_U0: Tensor | None = None,
        scale_U0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """loc_S and scale_S.

        Args:
            loc_U: (..., D), float32 or float64.
            scale_U: (..., D), > 0.
            loc_U0: (...), or None for 0.
            scale_U0: (...), or None for 0.

        Returns:
            (..., V) each, in the dtype of ``loc_U``.
        """
        if (native := self._few(loc_U)) is not None:
            loc_S, scale_S = native.scores(*_flat(loc_U, scale_U, loc_U0, scale_U0))
            return loc_S.view(*loc_U.shape[:-1], -1), scale_S.view(*loc_U.shape[:-1], -1)
        with torch.no_grad(), torch.autocast(loc_U.device.type, enabled=False):
            flat_loc, flat_scale = (U.detach().reshape(-1, U.shape[-1]) for U in (loc_U, scale_U))  # (N, D)
            shape = (*loc_U.shape[:-1], self.matrix.weight.shape[0])
            loc_S, scale_S = (S.view(shape) for S in _products(flat_loc, flat_scale, self.matrix))
            if self.bias is not None:
                loc_S += self.bias
            if loc_U0 is not None:
                loc_S += loc_U0.unsqueeze(-1)
            if self.balance is not None:
                scale_S += self.balance * scale_U.mean(-1, keepdim=True)
            if scale_U0 is not None:
                scale_S += scale_U0.unsqueeze(-1)
        return loc_S, scale_S

    def z_scores(
        self,
        loc_U: Tensor,
        scale_U: Tensor,
        loc_U0: Tensor | None = None,
        scale_U0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(loc_S − C)/scale_S, ordered as P(S > C), and its argmax, (..., V) and (...); arguments as for
        `scores`.
        """
        leading = loc_U.shape[:-1]
        if (native := self._few(loc_U)) is not None:
            z_scores, best = native.z_scores(*_flat(loc_U, scale_U, loc_U0, scale_U0))
            return (z_scores, best) if loc_U.ndim == 2 else (z_scores.view(*leading, -1), best.view(leading))
        loc_S, scale_S = self.scores(loc_U, scale_U, loc_U0, scale_U0)
        z_scores = (loc_S if self.threshold is None else loc_S.sub_(self.threshold)).div_(scale_S)
        return z_scores, z_scores.argmax(-1)

    def reads_few(self, loc_U: Tensor, k: int) -> bool:
        """Whether `among` can score k tokens of (N, D) causes: natively, by their rows of W only."""
        return self._few(loc_U) is not None and k <= self.matrix.weight.shape[0] // FEW_OF

    def among(
        self,
        logits: Tensor,
        k: int,
        loc_U: Tensor,
        scale_U: Tensor | None = None,
        loc_U0: Tensor | None = None,
        scale_U0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The choice among the tokens of the k largest logits, where `reads_few` says so.

        Args:
            logits: (N, V) float32; ties with the k-th largest stay.
            k: At least 1.
            loc_U: (N, D).
            scale_U: (N, D); None scores by W loc_U + b instead of z-scores.
            loc_U0: (N,), or None for 0.
            scale_U0: (N,), or None for 0.

        Returns:
            Scores (N, V), −inf for all others, and their argmax (N,).
        """
        native = self._native
        assert native is not None
        return native.among(logits, k, loc_U, scale_U, loc_U0, scale_U0)


def token_scores(
    loc_U: Tensor,
    scale_U: Tensor,
    weight: Tensor | Matrix,
    *,
    bias: Tensor | None = None,
    balance: Tensor | None = None,
    loc_U0: Tensor | None = None,
    scale_U0: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`TokenScorer.scores` of a W that is used once."""
    return TokenScorer(weight, bias=bias, balance=balance).scores(loc_U, scale_U, loc_U0, scale_U0)


def _flat(
    loc_U: Tensor, scale_U: Tensor, loc_U0: Tensor | None, scale_U0: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(N, D) twice and (N,) twice."""
    if loc_U.ndim == 2:
        return loc_U, scale_U, loc_U0, scale_U0
    size = loc_U.shape[-1]
    loc_0, scale_0 = (None if part is None else part.reshape(-1) for part in (loc_U0, scale_U0))
    return loc_U.reshape(-1, size), scale_U.reshape(-1, size), loc_0, scale_0


def _products(loc_U: Tensor, scale_U: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """W loc_U and |W| scale_U, (N, V) each, for (N, D), block by block."""
    if torch.compiler.is_compiling():  # already inside somebody's graph, which fuses on its own
        weight = matrix.dense().to(loc_U.dtype)
        return F.linear(loc_U, weight), F.linear(scale_U, weight.abs())
    vocab_size, width = matrix.weight.shape[0], matrix.columns
    loc_S, scale_S = loc_U.new_empty(2, loc_U.shape[0], vocab_size)
    size = BLOCK_ROWS if loc_U.device.type == "cpu" else ACCELERATOR_BLOCK_ROWS
    absolute = loc_U.new_empty(min(size, vocab_size), width)
    for first in range(0, vocab_size, size):
        block = slice(first, min(first + size, vocab_size))
        part = matrix.rows(block)
        rows = (part.weight if part.scale is None else part.dense()).to(loc_U.dtype)  # (v, D)
        torch.mm(loc_U, rows.T, out=loc_S[:, block])
        torch.mm(scale_U, torch.abs(rows, out=absolute[: block.stop - first]).T, out=scale_S[:, block])
    return loc_S, scale_S
