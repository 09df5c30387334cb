"""loc_S and scale_S of a few positions from one read of W, and the choice that they make.

Decoding is bound by reading W. loc_S needs W·loc_U and scale_S needs |W|·scale_U, from the same elements: one
pass serves both, and |W| is never stored. This module does not know sampling, processors or what U is.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.interface import CMatrix, CScores
from causal_qwen.kernels.library import loaded
from causal_qwen.kernels.native import pointer
from causal_qwen.kernels.products import Linear, Matrix

__all__ = ["TokenScorer"]

# One thread scores the chosen tokens: they must be few of all.
FEW_OF = 16
# Rows of W whose absolute values exist at one time, where |W| is needed as a matrix: on a CPU they stay in
# its cache, on an accelerator few launches serve all rows.
BLOCK_ROWS = 1024
ACCELERATOR_BLOCK_ROWS = 1 << 15


class TokenScorer(Linear):
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
        super().__init__(weight, bias)
        self.balance, self.threshold = (
            None if part is None else part.detach() for part in (balance, threshold)
        )

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
        if (matrix := self.native_for(loc_U)) is not None:
            loc_S, scale_S = torch.empty(2, *loc_U.shape[:-1], matrix.rows)
            self._fill(matrix, loc_U, scale_U, loc_U0, scale_U0, loc_S=loc_S, scale_S=scale_S)
            return loc_S, scale_S
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
        if (matrix := self.native_for(loc_U)) is not None:
            z_scores, best = _places(matrix, *loc_U.shape[:-1])
            self._fill(matrix, loc_U, scale_U, loc_U0, scale_U0, z_scores=z_scores, best=best)
            return z_scores, best
        loc_S, scale_S = self.scores(loc_U, scale_U, loc_U0, scale_U0)
        z_scores = (loc_S if self.threshold is None else loc_S.sub_(self.threshold)).div_(scale_S)
        return z_scores, z_scores.argmax(-1)

    def reads_few(self, loc_U: Tensor, k: int) -> bool:
        """Whether `among` can score k tokens of (N, D) causes: natively, by their rows of W only."""
        return self.native_for(loc_U) is not None and k <= self.matrix.weight.shape[0] // FEW_OF

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
        matrix = self.native
        assert matrix is not None
        scores, best = _places(matrix, len(logits))
        allowed = (logits.contiguous(), min(k, matrix.rows))
        self._fill(matrix, loc_U, scale_U, loc_U0, scale_U0, allowed, z_scores=scores, best=best)
        return scores, best

    @functools.cached_property
    def _native_terms(self) -> dict[str, Tensor]:
        terms = {"balance": self.balance, "threshold": self.threshold}
        return {name: term.float().contiguous() for name, term in terms.items() if term is not None}

    def _fill(
        self,
        matrix: CMatrix,
        loc_U: Tensor,
        scale_U: Tensor | None,
        loc_U0: Tensor | None,
        scale_U0: Tensor | None,
        allowed: tuple[Tensor, int] | None = None,
        **outputs: Tensor,
    ) -> None:
        """Fill ``outputs``, fields of `CScores`; with ``allowed``, logits and k, for the k largest only."""
        count, rows, columns = loc_U.numel() // loc_U.shape[-1], matrix.rows, matrix.columns
        # The structure points into these tensors, which stay until the call returns.
        causes = [None if part is None else part.reshape(count, -1).contiguous() for part in (loc_U, scale_U)]
        terms = {"loc_U0": loc_U0, "scale_U0": scale_U0}
        common = {
            name: part.float().flatten().contiguous() for name, part in terms.items() if part is not None
        }
        scores = CScores(
            **{name: output.data_ptr() for name, output in outputs.items()},
            **{name: pointer(term, (rows,)) for name, term in self._native_terms.items()},
            **{name: pointer(part, (count,)) for name, part in common.items()},
        )
        U = [pointer(part, (count, columns)) for part in causes]
        if allowed is None:
            loaded().token_scores(matrix, *U, scores, count, torch.get_num_threads())
        else:
            logits, k = allowed
            loaded().token_scores_among(matrix, pointer(logits, (count, rows)), k, *U, scores, count)


def _places(matrix: CMatrix, *leading: int) -> tuple[Tensor, Tensor]:
    """Room for scores (..., V) and their argmax (...)."""
    return torch.empty(*leading, matrix.rows), torch.empty(leading, dtype=torch.int64)


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
