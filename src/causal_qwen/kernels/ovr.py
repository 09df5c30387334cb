"""The One-vs-Rest sum over blocks of the vocabulary, its gradients in the same pass.

One-vs-Rest has no normaliser: each token's term is final as soon as its score is. So one walk over W yields
loss and gradients together, block by block, and no (N, V) tensor ever exists. With G = ∂loss/∂loc_S and
H = ∂loss/∂scale_S,

    ∂/∂loc_U = G W          ∂/∂scale_U = H |W|       ∂/∂W = Gᵀ loc_U + sign(W) ⊙ Hᵀ scale_U
    ∂/∂loc_U0 = G 1         ∂/∂scale_U0 = H 1        ∂/∂mean_scale = H balance
    ∂/∂offset = Gᵀ 1        ∂/∂balance = Hᵀ mean_scale

This module does not know ignored labels, what the sum is divided by, or where the rows of W come from.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """loc_S = W loc_U + offset + loc_U0 and scale_S = |W| scale_U + balance·mean_scale + scale_U0.

    All in one dtype, float32 or float64, but for W, which may be narrower.

    Args:
        loc_U: (N, D).
        scale_U: (N, D), > 0.
        weight: (V, D) W.
        offset: (V,) b − C, so that the threshold of every score is 0.
        balance: (V,) ≥ 0.
        mean_scale: (N,) mean of scale_U.
        loc_U0: (N,).
        scale_U0: (N,).
    """

    loc_U: Tensor
    scale_U: Tensor
    weight: Tensor
    offset: Tensor
    balance: Tensor
    mean_scale: Tensor
    loc_U0: Tensor
    scale_U0: Tensor


NAMES = tuple(field.name for field in fields(Scores))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ovr_sum(scores: Scores, labels: Tensor, importance: Tensor, *, block_size: int | None = None) -> Tensor:
    """−Σ_n Σ_k w_k·[ y_nk log P(S_nk > 0) + (1 − y_nk) log P(S_nk ≤ 0) ], a scalar.

    Differentiable once, in every tensor of ``scores``. Inside torch.compile it is a graph break.

    Args:
        scores: N positions, V tokens.
        labels: (N,) rows of W, all valid.
        importance: (V,) w.
        block_size: Rows of W per block; None chooses from the sizes.
    """
    tensors = [getattr(scores, name) for name in NAMES]
    # Inside a Function the grad mode is off, and needs_input_grad does not know it: ask here.
    with_grad = torch.is_grad_enabled()
    apply: Callable[..., Tensor] = _OvrSum.apply
    return apply(with_grad, labels, importance.detach(), block_size, *tensors)


def choose_blocks(
    num_tokens: int, vocab_size: int, width: int, *, block_size: int | None, device: torch.device
) -> tuple[int, int]:
    """(tokens, rows of W) per block: as large as the cache that they should stay in.

    Args:
        num_tokens: N.
        vocab_size: V.
        width: D.
        block_size: The rows that the caller wants, or None.
        device: Where the walk runs.
    """
    elements = CPU_BLOCK_ELEMENTS if device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS
    tokens = min(num_tokens, elements // ROWS_FOR_MANY_TOKENS)
    rows = block_size or max(elements // max(tokens, width, 1) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return max(tokens, 1), max(min(rows, vocab_size), 1)


class _OvrSum(torch.autograd.Function):
    """Forward walks once and keeps the gradients; backward multiplies them by the incoming one."""

    @staticmethod
    def forward(
        ctx: Any,
        with_grad: bool,
        labels: Tensor,
        importance: Tensor,
        block_size: int | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.wanted = dict(zip(NAMES, ctx.needs_input_grad[4:], strict=True))
        ctx.block_size = block_size
        if with_grad:
            ctx.save_for_backward(labels, importance, *tensors)
        wanted = ctx.wanted if with_grad else dict.fromkeys(NAMES, False)
        total, ctx.grads = _walk(Scores(*tensors), labels, importance, block_size, wanted)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:  # a second backward through a retained graph: the first gave its buffers away
            labels, importance, *tensors = ctx.saved_tensors
            _, grads = _walk(Scores(*tensors), labels, importance, ctx.block_size, ctx.wanted)
        # In place: the largest of them is as large as W.
        return None, None, None, None, *(grads[name].mul_(grad) if name in grads else None for name in NAMES)


def _walk(
    scores: Scores, labels: Tensor, importance: Tensor, block_size: int | None, wanted: dict[str, bool]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum, and the gradient of each tensor that is wanted."""
    dtype, device, weight = scores.loc_U.dtype, scores.loc_U.device, scores.weight
    (num_tokens, width), vocab_size = scores.loc_U.shape, weight.shape[0]
    token_step, row_step = choose_blocks(num_tokens, vocab_size, width, block_size=block_size, device=device)
    grads = {name: torch.zeros_like(getattr(scores, name)) for name in NAMES[:2] + NAMES[3:] if wanted[name]}
    if wanted["weight"]:  # every row is written once, unless there is no token to write it
        grads["weight"] = torch.empty_like(weight) if num_tokens else torch.zeros_like(weight)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if num_tokens == 0:
        return total.to(dtype), grads

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    score_buffers = empty(3, token_step * row_step)
    row_buffers = empty(4 if wanted["weight"] else 2, row_step, width)
    labels = labels.to(torch.int32)
    for first in range(0, vocab_size, row_step):
        block = slice(first, min(first + row_step, vocab_size))
        rows, absolute, *products = row_buffers[:, : block.stop - first]  # (v, D) each
        rows = weight[block] if weight.dtype == dtype else rows.copy_(weight[block])
        torch.abs(rows, out=absolute)
        balance = scores.balance[block]
        for start in range(0, num_tokens, token_step):
            tokens = slice(start, min(start + token_step, num_tokens))
            shape = (3, tokens.stop - start, block.stop - first)
            G, H, loss = score_buffers[:, : shape[1] * shape[2]].view(shape)  # (n, v) each
            loc_U, scale_U = scores.loc_U[tokens], scores.scale_U[tokens]
            mean_scale = scores.mean_scale[tokens]
            torch.mm(loc_U, rows.T, out=G)
            torch.mm(scale_U, absolute.T, out=H)
            tail_block_(
                G,
                H,
                loss,
                labels=labels[tokens] - first,
                offset=scores.offset[block],
                balance=balance,
                importance=importance[block],
                mean_scale=mean_scale,
                loc_U0=scores.loc_U0[tokens],
                scale_U0=scores.scale_U0[tokens],
            )
            total += loss.sum(1).sum(dtype=torch.float64)
            if wanted["loc_U"]:
                grads["loc_U"][tokens].addmm_(G, rows)
            if wanted["scale_U"]:
                grads["scale_U"][tokens].addmm_(H, absolute)
            if wanted["weight"]:
                for product, slope, factor in zip(products, (G, H), (loc_U, scale_U), strict=True):
                    torch.addmm(product, slope.T, factor, beta=0 if start == 0 else 1, out=product)
            if wanted["offset"]:
                grads["offset"][block] += G.sum(0)
            if wanted["balance"]:
                grads["balance"][block] += mean_scale @ H
            if wanted["mean_scale"]:
                grads["mean_scale"][tokens] += H @ balance
            if wanted["loc_U0"]:
                grads["loc_U0"][tokens] += G.sum(1)
            if wanted["scale_U0"]:
                grads["scale_U0"][tokens] += H.sum(1)
        if wanted["weight"]:
            by_loc, by_scale = products
            grads["weight"][block] = by_loc.addcmul_(torch.sign(rows, out=absolute), by_scale)
    return total.to(dtype), grads
