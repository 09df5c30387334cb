"""The One-vs-Rest sum over blocks of the vocabulary, its gradients in the same pass.

One-vs-Rest has no normaliser: each token's term is final as soon as its score is. So one walk over W yields
loss and gradients together, block by block, and no (N, V) tensor ever exists. All that a score depends on is
a column of two matrix products,

    loc_S = X Rᵀ,    X = [loc_U, loc_U0, 1],             R = [W, 1, offset]
    scale_S = Y Aᵀ,  Y = [scale_U, scale_U0, mean_scale], A = [|W|, 1, balance]

so with G = ∂loss/∂loc_S and H = ∂loss/∂scale_S all gradients are columns of four more:

    ∂/∂X = G R,  ∂/∂Y = H A,  ∂/∂R = Gᵀ X,  ∂/∂A = Hᵀ Y,  ∂/∂W = ∂/∂R + sign(W) ⊙ ∂/∂A.

G may be bounded: then all of these are those of the bounded G, and the sum itself is what it was.

This module does not know ignored labels, what the sum is divided by, or where the rows of W come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from causal_qwen.kernels.tail import tail_block_

__all__ = ["Scores", "choose_blocks", "ovr_sum"]

# A block of scores, and one of W, hold about this many elements: on a CPU they stay in its last cache, on
# an accelerator they fill it.
CPU_BLOCK_ELEMENTS = 1 << 21
ACCELERATOR_BLOCK_ELEMENTS = 1 << 25
ROW_MULTIPLE = 64
# With many tokens, blocks are cut in the tokens too rather than to fewer rows than this.
ROWS_FOR_MANY_TOKENS = 1024
# Matrices are stored with rows that begin at such multiples: products are slower otherwise.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """loc_S = [W, 1, offset]·X and scale_S = [|W|, 1, balance]·Y, against the threshold 0.

    All in one dtype, float32 or float64, but for W, which may be narrower.

    Args:
        X: (N, D + 2) [loc_U, loc_U0, 1].
        Y: (N, D + 2) [scale_U, scale_U0, mean_scale], > 0 in sum.
        weight: (V, D) W.
        offset: (V,) b − C.
        balance: (V,) ≥ 0.
    """

    X: Tensor
    Y: Tensor
    weight: Tensor
    offset: Tensor
    balance: Tensor


NAMES = tuple(field.name for field in fields(Scores))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ovr_sum(
    scores: Scores,
    labels: Tensor,
    importance: Tensor,
    *,
    steepest: Tensor | None = None,
    block_size: int | None = None,
) -> Tensor:
    """−Σ_n Σ_k w_k·[ y_nk log P(S_nk > 0) + (1 − y_nk) log P(S_nk ≤ 0) ], a scalar.

    Differentiable once, in every tensor of ``scores``. Inside torch.compile it is a graph break.

    Args:
        scores: N positions, V tokens.
        labels: (N,) rows of W, all valid.
        importance: (V,) w.
        steepest: (V,) what |∂/∂loc_S| of a term, w included, is cut off at; None for no bound.
        block_size: Rows of W per block; None chooses from the sizes.
    """
    if steepest is None:
        steepest = torch.full_like(importance, math.inf)
    tensors = [getattr(scores, name) for name in NAMES]
    # Inside a Function the grad mode is off, and needs_input_grad does not know it: ask here.
    with_grad = torch.is_grad_enabled()
    apply: Callable[..., Tensor] = _OvrSum.apply
    return apply(with_grad, labels, importance.detach(), steepest.detach(), block_size, *tensors)


def choose_blocks(
    num_tokens: int, vocab_size: int, width: int, *, block_size: int | None, device: torch.device
) -> tuple[int, int]:
    """(tokens, rows of W) per block of N × V scores, as large as the cache that they should stay in; the rows
    are ``block_size`` unless that is None.
    """
    elements = CPU_BLOCK_ELEMENTS if device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS
    tokens = min(num_tokens, elements // ROWS_FOR_MANY_TOKENS)
    rows = block_size or max(elements // max(tokens, width, 1) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return _even(num_tokens, tokens), _even(vocab_size, rows)


def _even(total: int, step: int) -> int:
    """The step, at most the given one, that cuts ``total`` into as few parts, as equal as they can be."""
    parts = -(-total // max(step, 1))
    return max(-(-total // max(parts, 1)), 1)


class _OvrSum(torch.autograd.Function):
    """Forward walks once and keeps the gradients; backward multiplies them by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any,
        with_grad: bool,
        labels: Tensor,
        importance: Tensor,
        steepest: Tensor,
        block_size: int | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.needed = dict(zip(NAMES, ctx.needs_input_grad[5:], strict=True))
        ctx.block_size = block_size
        if with_grad:
            ctx.save_for_backward(labels, importance, steepest, *tensors)
        needed = ctx.needed if with_grad else dict.fromkeys(NAMES, False)
        total, ctx.grads = _walk(Scores(*tensors), labels, importance, steepest, block_size, needed)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # a second backward through a retained graph: the first gave its buffers away
            labels, importance, steepest, *tensors = ctx.saved_tensors
            _, grads = _walk(Scores(*tensors), labels, importance, steepest, ctx.block_size, ctx.needed)
        # In place: the largest of them is as large as W.
        slopes = (grads[name].mul_(grad) if name in grads else None for name in NAMES)
        return None, None, None, None, None, *slopes


def _walk(
    scores: Scores,
    labels: Tensor,
    importance: Tensor,
    steepest: Tensor,
    block_size: int | None,
    needed: dict[str, bool],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum, and the gradient of each tensor that needs one."""
    (num_tokens, width), (vocab_size, rank) = scores.X.shape, scores.weight.shape  # D + 2, D
    dtype, device = scores.X.dtype, scores.X.device
    token_step, row_step = choose_blocks(num_tokens, vocab_size, width, block_size=block_size, device=device)

    def matrix(rows: int) -> Tensor:
        stride = -(-width // ALIGNMENT) * ALIGNMENT
        return torch.zeros(rows, stride, dtype=dtype, device=device)[:, :width]

    grads = {name: matrix(num_tokens) for name in ("X", "Y") if needed[name]}
    # Every row of these is written once, unless there is no token to write it.
    new = torch.empty_like if num_tokens else torch.zeros_like
    grads |= {name: new(getattr(scores, name)) for name in ("weight", "offset", "balance") if needed[name]}
    X, Y = matrix(num_tokens).copy_(scores.X), matrix(num_tokens).copy_(scores.Y)
    R, A, dR, dA = (matrix(row_step) for _ in range(4))
    R[:, rank] = A[:, rank] = 1
    # Without a gradient of W only the last two columns of dR and dA have a use.
    first_column = 0 if needed["weight"] else rank
    by_row = needed["weight"] or needed["offset"] or needed["balance"]
    # Tensors of their own for each shape of block, at most four: views would have their bases compiled in.
    buffers: dict[tuple[int, int], list[Tensor]] = {}
    labels = labels.to(torch.int32)

    for first in range(0, vocab_size if num_tokens else 0, row_step):
        block = slice(first, min(first + row_step, vocab_size))
        R, A, dR, dA = (buffer[: block.stop - first] for buffer in (R, A, dR, dA))  # (v, D + 2)
        W, absolute = R[:, :rank], A[:, :rank]
        torch.abs(W.copy_(scores.weight[block]), out=absolute)
        R[:, -1], A[:, -1] = scores.offset[block], scores.balance[block]
        for start in range(0, num_tokens, token_step):
            tokens = slice(start, min(start + token_step, num_tokens))
            x, y = X[tokens], Y[tokens]  # (n, D + 2)
            shape = len(x), len(R)
            if shape not in buffers:
                buffers[shape] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(3)]
            G, H, loss = buffers[shape]
            torch.mm(x, R.T, out=G)  # loc_S
            torch.mm(y, A.T, out=H)  # scale_S
            columns = (importance[block].clone(), steepest[block].clone())
            tail_block_(G, H, loss, labels[tokens] - first, *columns)
            if needed["X"]:
                grads["X"][tokens].addmm_(G, R)
            if needed["Y"]:
                grads["Y"][tokens].addmm_(H, A)
            if by_row:
                for product, slope, cause in ((dR, G, x), (dA, H, y)):
                    used = product[:, first_column:]
                    used.addmm_(slope.T, cause[:, first_column:], beta=0 if start == 0 else 1)
        if needed["weight"]:
            slope_W = dR[:, :rank].addcmul_(torch.sign(W, out=absolute), dA[:, :rank])
            grads["weight"][block] = slope_W
        if needed["offset"]:
            grads["offset"][block] = dR[:, -1]
        if needed["balance"]:
            grads["balance"][block] = dA[:, -1]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, _, loss in buffers.values():
        total += loss.sum(dtype=torch.float64)
    return total.to(dtype), grads
