"""The mechanism alone: the model's own heads and losses on features, no backbone and no text."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from causal_qwen.cauchy import Cauchy
from causal_qwen.heads import AbductionNetwork, ActionNetwork
from causal_qwen.losses import number_gate, number_loss, ovr_loss
from causal_qwen.simulation.structure import Individuals

__all__ = ["Mechanism"]

NumberLoss = Literal["cauchy", "squared"]


class Mechanism(nn.Module):
    """h → U → (S, Y) by AbductionNetwork and ActionNetwork, with a W of its own.

    Args:
        hidden_size: H.
        causal_size: D.
        vocab_size: V; the last token is <NUM>.
        seed: Of the starting point.
    """

    def __init__(self, hidden_size: int, causal_size: int, vocab_size: int, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.abduction = AbductionNetwork(hidden_size, causal_size)
            self.abduction.reset_parameters(gamma=1.0, strategy="xavier")
            self.action = ActionNetwork(vocab_size, causal_size)
            self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(vocab_size, causal_size)))

    def forward(self, features: Tensor) -> tuple[Cauchy, Cauchy, Cauchy]:
        """U' (N, D), U₀ (N,) and Y (N,) of features (N, H)."""
        U, U0 = self.abduction(features)
        U_noisy = self.action.exogenous(U)
        return U_noisy, U0, self.action.numbers(U_noisy)

    def prob_num(self, U: Cauchy, U0: Cauchy) -> Tensor:
        """P_<NUM>, (N,)."""
        row = slice(self.weight.shape[0] - 1, None)
        return self.action.scores(U, U0, self.weight, row).sf(self.action.threshold[row]).squeeze(-1)

    def choose(self, U: Cauchy, U0: Cauchy) -> Tensor:
        """The deterministic token, (N,)."""
        return self.action.z_scores(self.action.scores(U, U0, self.weight)).argmax(-1)

    def loss(self, individuals: Individuals) -> Tensor:
        """L_cls + L_reg of the model, with the gate P_<NUM>."""
        U, U0, Y = self(individuals.features)
        is_num = individuals.labels == self.weight.shape[0] - 1
        cls_loss = ovr_loss(
            U,
            U0,
            self.weight,
            individuals.labels,
            bias=self.action.bias,
            balance=self.action.balance,
            threshold=self.action.threshold,
        )
        gate = number_gate(self.prob_num(U[is_num], U0[is_num]), alpha=0.0, gradient=False)
        return cls_loss + number_loss(Y[is_num], individuals.values[is_num], gate)

    def regression_loss(self, features: Tensor, values: Tensor, kind: NumberLoss) -> Tensor:
        """The number alone, without a gate: by the Cauchy law, or by (loc_Y − v)² with the same heads."""
        _, _, Y = self(features)
        if kind == "squared":
            return torch.nn.functional.mse_loss(Y.loc, values)
        return number_loss(Y, values, torch.ones_like(values))

    def slope(self) -> Tensor:
        """∂loc_Y/∂h = W_locᵀ w, (H,)."""
        slope: Tensor = self.abduction.loc.weight.T @ self.action.number.weight[0]
        return slope

    def intercept(self) -> Tensor:
        """loc_Y at h = 0."""
        intercept: Tensor = self.action.number.weight[0] @ self.abduction.loc.bias
        return intercept + self.action.number.bias[0]
