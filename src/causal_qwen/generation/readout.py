"""The heads as decisions ask for them: what they hold of W, b, balance and C is looked up once per text.

After a step of the backbone every cache is cold, and each small operation between two tokens costs tens of
microseconds: this module keeps them few. It does not know modes, noise or text.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.generation.protocol import CausalHeads, CausalModel
from causal_qwen.heads import exact
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.kernels.products import Linear, Matrix

__all__ = ["ReadOut"]


class ReadOut:
    """From causes to token scores and numbers; without gradients.

    Args:
        model: Whose weights stay as they are meanwhile.
        weight: W in another form, such as integers; the model's own when None.
    """

    @torch.no_grad()
    def __init__(self, model: CausalHeads, weight: Matrix | None = None) -> None:
        matrix = Matrix(cast(CausalModel, model).lm_head.weight) if weight is None else weight
        self.model = model
        self.action = action = model.action
        self.noise = exact(magnitude(action.b_noise))  # (D,)
        self.act = Linear(matrix, exact(action.bias))  # W u + b: (B, D) → (B, V)
        self._own_weight = weight is None
        self._scorer = TokenScorer(
            matrix,
            bias=exact(action.bias),
            balance=exact(magnitude(action.balance)),
            threshold=exact(action.threshold),
        )

    def number(self, U: Cauchy) -> Cauchy:
        """Y (B,) of the widened cause, in value space."""
        return self.action.numbers(self.action.exogenous(U, noise=self.noise))

    def logits(self, loc_U: Tensor) -> Tensor:
        """W loc_U + b, (B, V), float32 or wider; with the model's own W rounded as in its output."""
        if not self._own_weight:
            return self.act(loc_U)
        return exact(cast(CausalModel, self.model).token_logits(loc_U))

    def scores(self, U: Cauchy, U0: Cauchy) -> Cauchy:
        """S, (B, V)."""
        return Cauchy(*self._scorer.scores(U.loc, U.scale, U0.loc, U0.scale))

    def z_scores(self, U: Cauchy, U0: Cauchy) -> tuple[Tensor, Tensor]:
        """(loc_S − C)/scale_S and its argmax, (B, V) and (B,)."""
        return self._scorer.z_scores(U.loc, U.scale, U0.loc, U0.scale)

    def among(
        self, k: int, loc_U: Tensor, moved: Tensor, scale_U: Tensor | None = None, U0: Cauchy | None = None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The choice of a moved cause among the k largest logits, if that takes less than all scores.

        Args:
            k: How many tokens are allowed.
            loc_U: (B, D) where the logits are.
            moved: (B, D) location of the cause that decides.
            scale_U: (B, D) its scale; None for a concrete cause, which decides by W u + b.
            U0: (B,), of a cause with a scale.

        Returns:
            Scores (B, V), −inf where not allowed, their argmax (B,), and the logits (B, V); or None.
        """
        if not self._scorer.reads_few(moved, k):
            return None
        logits = self.act(loc_U)
        common = (None, None) if U0 is None else (U0.loc, U0.scale)
        return *self._scorer.among(logits, k, moved, scale_U, *common), logits
