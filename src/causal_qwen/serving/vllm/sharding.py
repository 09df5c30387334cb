"""Scores where W is divided among processes: each scores its own tokens, and all see all.

b, balance and C are divided with W. This module knows vLLM's groups of processes, not how a token is decided.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather

from causal_qwen.cauchy import Cauchy
from causal_qwen.generation.readout import ReadOut
from causal_qwen.kernels.products import Linear, Matrix

__all__ = ["ShardedReadOut", "gathered"]


def gathered(local: Tensor, heads: Any) -> Tensor:
    """(..., V) from the pieces (..., V_own) of all processes, each padded to the same length."""
    padded = heads.lm_head.num_embeddings_per_partition
    piece = nn.functional.pad(local, (0, padded - local.shape[-1]))
    whole: Tensor = tensor_model_parallel_all_gather(piece.contiguous(), dim=-1)
    return whole[..., : heads.config.vocab_size]


class ShardedReadOut(ReadOut):
    """A `ReadOut` over one part of the vocabulary that answers for the whole.

    Args:
        heads: The model, whose action has the (V_own,) parameters of this process.
        weight: W (V_own, D).
    """

    def __init__(self, heads: Any, weight: Matrix) -> None:
        super().__init__(heads, weight)
        self.heads = heads
        self.act = _ShardedLinear(self.act, heads)
        # Adjusted scores of all tokens are compared with all thresholds.
        self.action = copy.copy(heads.action)
        self.action._parameters = dict(heads.action._parameters)
        self.action.threshold = nn.Parameter(
            gathered(heads.action.threshold.data, heads), requires_grad=False
        )

    def logits(self, loc_U: Tensor) -> Tensor:
        """As in `ReadOut`."""
        return self.act(loc_U)

    def scores(self, U: Cauchy, U0: Cauchy) -> Cauchy:
        """As in `ReadOut`."""
        S = super().scores(U, U0)
        return Cauchy(gathered(S.loc, self.heads), gathered(S.scale, self.heads))

    def z_scores(self, U: Cauchy, U0: Cauchy) -> tuple[Tensor, Tensor]:
        """As in `ReadOut`."""
        z_scores = gathered(super().z_scores(U, U0)[0], self.heads)
        return z_scores, z_scores.argmax(-1)

    def reads_few(self, moved: Tensor, k: int) -> bool:
        """Never: the k best of a part are not the k best of all."""
        return False


class _ShardedLinear(Linear):
    """W u + b of the whole vocabulary, from a `Linear` over this process's part."""

    def __init__(self, own: Linear, heads: Any) -> None:
        super().__init__(own.matrix, own.bias)
        self.heads = heads

    def __call__(self, x: Tensor) -> Tensor:
        return gathered(super().__call__(x), self.heads)

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self(x)
        return y, torch.argmax(y, -1)
