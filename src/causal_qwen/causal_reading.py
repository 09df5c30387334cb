"""What is read from causes: the next number with its interval, and how likely a number is at all.

A mixin of every causal model, whoever runs its backbone. It knows no class of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.decoder.engine import Engine
from causal_qwen.generation.native import NativeFeatures
from causal_qwen.generation.protocol import CausalHeads
from causal_qwen.generation.stepping import Causes
from causal_qwen.heads import NUM_BIAS, AbductionNetwork, ActionNetwork, NumericEmbedding, exact, token_scores
from causal_qwen.intervals import read_numbers
from causal_qwen.number_prediction import NumberPrediction
from causal_qwen.value_space import ValueSpace

__all__ = ["CausalReading"]


class CausalReading:
    """Goes into a class with the heads of a causal model, and a backbone or an engine."""

    config: Any
    numeric_embedding: NumericEmbedding
    abduction: AbductionNetwork
    action: ActionNetwork
    lm_head: nn.Linear
    engine: Engine | None = None  # where it is all the backbone that there is

    @property
    def value_space(self) -> ValueSpace:
        """Where this model's numbers live."""
        return ValueSpace(self.config.value_space, self.config.value_center, self.config.value_spread)

    @property
    def writes_numbers(self) -> bool:
        """Whether <NUM> can be chosen: it exists, and training has moved its bias from where conversion
        put it.
        """
        num_token_id = self.config.num_token_id
        return num_token_id is not None and self.action.bias[num_token_id].item() != NUM_BIAS

    def prob_num(self, U: Cauchy, U0: Cauchy, engine: Engine | None = None) -> Tensor:
        """P_<NUM> = P(S_<NUM> > C_<NUM>) for U' (..., D), from one row of W, or of the engine's."""
        row, action = slice(self.config.num_token_id, self.config.num_token_id + 1), self.action
        engine = engine or self.engine
        weight = self.lm_head.weight[row] if engine is None else engine.weights.head.rows(row).dense()
        bias, balance = exact(action.bias[row]), exact(magnitude(action.balance[row]))
        S = token_scores(U, U0, weight, bias=bias, balance=balance)
        return S.sf(exact(action.threshold[row])).squeeze(-1)

    def causes(self, batch: Mapping[str, Tensor], engine: Engine | None = None) -> Causes:
        """U (B, T, D) and U₀ (B, T) of whole texts, by the backbone itself or by an engine made from it.

        Args:
            batch: What forward takes; an engine reads ``input_ids``, ``attention_mask`` and
                ``numeric_values``.
            engine: Runs the backbone on the CPU, in its own precision; the heads stay this model's.

        Raises:
            ValueError: If the engine is another model's, or cannot read an entry of the batch.
        """
        engine = engine or self.engine
        if engine is None:
            outputs = cast(Any, self)(**batch, output_logits=False, use_cache=False)
            return Causes(outputs.U, outputs.U0)
        entries: dict[str, Any] = dict(batch)
        read = [entries.pop(name, None) for name in ("input_ids", "attention_mask", "numeric_values")]
        if entries:
            raise ValueError(
                f"the native engine reads tokens, masks and values, not {', '.join(sorted(entries))}; "
                "leave them out, or evaluate without engine="
            )
        return Causes(*self.abduction(NativeFeatures(cast(CausalHeads, self), engine)(*read)))

    @torch.no_grad()
    def predict_number(
        self,
        batch: Mapping[str, Tensor],
        level: float = 0.9,
        *,
        raw: bool = False,
        engine: Engine | None = None,
    ) -> NumberPrediction:
        """The number that would come next in each row: g⁻¹(loc_Y) and g⁻¹(loc_Y ± multiple·scale_Y).

        Args:
            batch: ``input_ids`` and, where there are any, ``attention_mask`` (padding on either side) and
                ``numeric_values``.
            level: Probability of the interval, in (0, 1).
            raw: Whether the interval is the Cauchy law's own, not the calibrated one (``conformal_scores``).
            engine: Runs the backbone, as in `causes`.
        """
        if self.config.num_token_id is None:
            raise ValueError("this model has no <NUM> token; `convert` its base first")
        causes = self.causes(batch, engine)
        rows, length = causes.U0.loc.shape
        row = torch.arange(rows, device=causes.U0.loc.device)
        last = torch.full_like(row, length - 1)
        if batch.get("attention_mask") is not None:
            last -= batch["attention_mask"].flip(-1).argmax(-1).to(last.device)
        U_noisy = self.action.exogenous(causes.U)
        # The number of every position, as in forward: a product of other rows is rounded otherwise.
        U_noisy, U0, Y = (law[row, last] for law in (U_noisy, causes.U0, self.action.numbers(U_noisy)))
        n = read_numbers(self.action, self.config, U_noisy, Y, level, raw=raw)
        prob_num = self.prob_num(U_noisy, U0, engine)
        return NumberPrediction(n.median, n.lower, n.upper, prob_num, level, n.extrapolates)
