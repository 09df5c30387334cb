"""loc_S and scale_S of a few positions from one read of W, and the choice that they make.

Decoding is bound by reading W. loc_S needs W·loc_U and scale_S needs |W|·scale_U, from the same elements: one
pass serves both, and |W| is never stored. This module does not know sampling, processors or what U is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.kernels.compiled import CompiledKernel
from causal_qwen.kernels.native import LARGEST_NATIVE, native_matrix, native_token_scores, runs_native
from causal_qwen.kernels.products import Matrix

__all__ = ["choose_token", "token_scores"]

# Positions that one compiled pass over W carries; other counts are padded up to the next.
PASS_SIZES = (1, 2, 4, 8)
# A matrix of fewer elements is read in little time: not worth a compiler.
SMALLEST_COMPILED = 1 << 24
# Parts of W that one position reads side by side, in 16 and in 32 bits.
PARTS = (2, 4)
# Rows of W whose absolute values exist at one time, where |W| is needed as a matrix.
BLOCK_ROWS = 1024


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
    """loc_S = W loc_U + b + loc_U0 and scale_S = |W| scale_U + balance·mean(scale_U) + scale_U0.

    Without gradients. Up to 48 positions take one pass over W in native code, up to 8 a compiled one on other
    devices; more positions, or a machine without a compiler, go block by block. All agree with the dense
    formula to rounding.

    Args:
        loc_U: (..., D), float32 or float64.
        scale_U: (..., D), > 0.
        weight: (V, D) W, any float dtype, or integers with their scales.
        bias: (V,) b, or None for 0.
        balance: (V,) ≥ 0, or None for 0.
        loc_U0: (...), or None for 0.
        scale_U0: (...), or None for 0.

    Returns:
        loc_S and scale_S, (..., V), in the dtype of ``loc_U``.
    """
    leading = loc_U.shape[:-1]
    matrix = weight if isinstance(weight, Matrix) else Matrix(weight)
    matrix = matrix._replace(weight=matrix.weight.detach())
    vocab_size = matrix.weight.shape[0]
    with torch.no_grad(), torch.autocast(loc_U.device.type, enabled=False):
        flat_loc, flat_scale = (U.detach().reshape(-1, U.shape[-1]) for U in (loc_U, scale_U))  # (N, D)
        few = 0 < len(flat_loc) <= LARGEST_NATIVE and loc_U.dtype == torch.float32
        compiling = torch.compiler.is_compiling()  # inside somebody's graph, which fuses on its own
        if few and not compiling and runs_native(matrix.weight, matrix.scale):
            # Held until the call is over.
            b, beta = (None if part is None else part.float().contiguous() for part in (bias, balance))
            loc_S, scale_S = native_token_scores(
                flat_loc,
                flat_scale,
                native_matrix(*matrix, b),
                balance=beta,
                loc_U0=None if loc_U0 is None else loc_U0.flatten(),
                scale_U0=None if scale_U0 is None else scale_U0.flatten(),
            )
            return loc_S.view(*leading, vocab_size), scale_S.view(*leading, vocab_size)
        loc_S, scale_S = _products(flat_loc, flat_scale, matrix)
        loc_S, scale_S = loc_S.view(*leading, vocab_size), scale_S.view(*leading, vocab_size)  # (..., V)
        if bias is not None:
            loc_S += bias
        if loc_U0 is not None:
            loc_S += loc_U0.unsqueeze(-1)
        if balance is not None:
            scale_S += balance * scale_U.mean(-1, keepdim=True)
        if scale_U0 is not None:
            scale_S += scale_U0.unsqueeze(-1)
    return loc_S, scale_S


def choose_token(
    loc_S: Tensor, scale_S: Tensor, threshold: Tensor, *, adjustment: Tensor | None = None
) -> Tensor:
    """argmax_k (loc_S,k − C_k)/scale_S,k = argmax_k P(S_k > C_k), with no probability computed.

    Args:
        loc_S: (..., V).
        scale_S: (..., V).
        threshold: (V,) C.
        adjustment: (..., V) added to the scores; −inf excludes a token. None adds nothing.

    Returns:
        Token ids, (...).
    """
    distance = loc_S - threshold
    if adjustment is not None:
        distance = distance + adjustment
    return (distance / scale_S).argmax(-1)


def _products(loc_U: Tensor, scale_U: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """W loc_U and |W| scale_U, (N, V) each, for (N, D)."""
    count = loc_U.shape[0]
    if torch.compiler.is_compiling():  # already inside somebody's graph, which fuses on its own
        weight = matrix.dense().to(loc_U.dtype)
        return F.linear(loc_U, weight), F.linear(scale_U, weight.abs())
    few = 0 < count <= PASS_SIZES[-1] and loc_U.dtype == torch.float32
    if not few or matrix.size < SMALLEST_COMPILED or matrix.scale is not None:
        return _block_products(loc_U, scale_U, matrix)
    padding = min(size for size in PASS_SIZES if size >= count) - count
    # Copies, so that tensors made in inference mode do not compile a variant of their own.
    with torch.inference_mode(False):
        loc_U, scale_U = (F.pad(U, (0, 0, 0, padding)) if padding else U.clone() for U in (loc_U, scale_U))
        loc_S, scale_S = _one_pass(loc_U, scale_U, matrix)
    return loc_S[:count], scale_S[:count]


def _block_products(loc_U: Tensor, scale_U: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """`_products` block by block, so that absolute values exist for one block of rows at a time."""
    vocab_size, width = matrix.weight.shape[0], matrix.columns
    loc_S, scale_S = loc_U.new_empty(2, loc_U.shape[0], vocab_size)
    absolute = loc_U.new_empty(min(BLOCK_ROWS, vocab_size), width)
    for first in range(0, vocab_size, BLOCK_ROWS):
        block = slice(first, min(first + BLOCK_ROWS, vocab_size))
        part = matrix.rows(block)
        rows = (part.weight if part.scale is None else part.dense()).to(loc_U.dtype)  # (v, D)
        torch.mm(loc_U, rows.T, out=loc_S[:, block])
        torch.mm(scale_U, torch.abs(rows, out=absolute[: block.stop - first]).T, out=scale_S[:, block])
    return loc_S, scale_S


def _pass_over_rows(loc_U: Tensor, scale_U: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
    """`_products` of floats as row sums, written out for every position: one loop over W carries them all.

    The loop reads several parts of W side by side: one row after the other does not keep the memory busy.
    """
    weight, count = matrix.weight, loc_U.shape[0]
    vocab_size = weight.shape[0]
    parts = max(PARTS[weight.itemsize == 4] // count, 1)
    size = -(-vocab_size // parts)
    loc_parts, scale_parts = [], []
    for first in range(0, vocab_size, size):
        start = min(first, vocab_size - size)  # parts of one length share the loop, so the last may overlap
        rows = weight[start : start + size].to(torch.float32)  # (v, D): never stored, but part of the loop
        absolute, own = rows.abs(), slice(first - start, None)
        loc_parts.append(torch.stack([(rows * vector).sum(-1)[own] for vector in loc_U]))
        scale_parts.append(torch.stack([(absolute * vector).sum(-1)[own] for vector in scale_U]))
    return torch.cat(loc_parts, -1), torch.cat(scale_parts, -1)


_one_pass = CompiledKernel(_pass_over_rows, _block_products, dynamic=False)
