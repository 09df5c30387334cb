"""The known networks, which take and return loose (loc, scale) tensors: each speaks for a head of
`causal_qwen.heads`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from causal_qwen import heads
from causal_qwen.cauchy import Cauchy, standard_draw
from causal_qwen_mvp.config import CausalQwen2Config

__all__ = ["AbductionNetwork", "ActionNetwork", "CauchyMath", "OvRClassifier"]


class CauchyMath:
    """The linear law of independent Cauchy variables. Modern: `causal_qwen.Cauchy.linear`, both at once."""

    @staticmethod
    def cauchy_linear_stable_loc(loc_input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """W·loc + b: where a linear layer puts the median. (..., D), (K, D), (K,) → (..., K)."""
        loc = heads.exact(loc_input)
        return Cauchy(loc, torch.zeros_like(loc)).linear(weight, bias).loc

    @staticmethod
    def cauchy_linear_stable_scale(scale_input: Tensor, weight: Tensor) -> Tensor:
        """|W|·scale: how wide a linear layer makes the law. (..., D), (K, D) → (..., K)."""
        scale = heads.exact(scale_input)
        return Cauchy(torch.zeros_like(scale), scale).linear(weight).scale


class AbductionNetwork(nn.Module):
    """z → (loc_U, scale_U). Modern: `causal_qwen.heads.AbductionNetwork`, which also infers U₀.

    Args:
        config: Sizes, activation and start.
        network: The network to speak for; a new one by default.
    """

    def __init__(self, config: CausalQwen2Config, *, network: heads.AbductionNetwork | None = None):
        super().__init__()
        self.config = config
        if network is None:
            network = heads.AbductionNetwork(
                config.hidden_size, config.causal_size, scale_activation=config.scale_activation
            )
            network.reset_parameters(gamma=config.gamma_init, strategy=config.abduction_init_strategy)
        self.network = network

    @property
    def loc_net(self) -> nn.Linear:
        """W_loc and b_loc."""
        return self.network.loc

    @property
    def scale_net(self) -> nn.Linear:
        """W_scale and b_scale."""
        return self.network.scale

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """loc_U and scale_U, (..., D) each, of features (..., H)."""
        U, _ = self.network(hidden_states)
        return U.loc, U.scale


class ActionNetwork(nn.Module):
    """(loc_U, scale_U) → (loc_S, scale_S). Modern: `causal_qwen.heads.ActionNetwork.scores`.

    Args:
        config: Sizes and start.
        network: The network to speak for; a new one by default.
        lm_head: W; a new one by default. In a model it is the model's own.
    """

    def __init__(
        self,
        config: CausalQwen2Config,
        *,
        network: heads.ActionNetwork | None = None,
        lm_head: nn.Linear | None = None,
    ):
        super().__init__()
        self.config = config
        if network is None:
            network = heads.ActionNetwork(
                config.vocab_size, config.causal_size, learn_threshold=config.learn_threshold
            )
            network.reset_parameters(
                b_noise=config.b_noise_init,
                threshold=config.ovr_threshold_init,
                jitter=config.ovr_threshold_jitter,
            )
        if lm_head is None:
            lm_head = nn.Linear(config.causal_size, config.vocab_size, bias=False)
            nn.init.normal_(lm_head.weight, std=config.initializer_range)
        self.network = network
        self.lm_head = lm_head

    @property
    def b_noise(self) -> nn.Parameter:
        """The exogenous noise, (D,)."""
        return self.network.b_noise

    @torch.no_grad()
    def copy_weights_from_qwen(self, qwen_model: Qwen2ForCausalLM) -> None:
        """W = the ``lm_head`` of a Qwen2 model, so that the location of S is its logits.

        Modern: `causal_qwen.convert`, which shares the tensor. A tied head brings the embedding's weights.

        Raises:
            ValueError: If the sizes differ.
        """
        theirs = qwen_model.lm_head.weight
        if theirs.shape != self.lm_head.weight.shape:
            raise ValueError(
                f"lm_head is {tuple(theirs.shape)} there and {tuple(self.lm_head.weight.shape)} here: "
                f"give the configuration vocab_size={theirs.shape[0]} and causal_size={theirs.shape[1]}"
            )
        self.lm_head.weight.copy_(theirs)

    def forward(
        self,
        loc_U: Tensor,
        scale_U: Tensor,
        do_sample: bool = False,
        temperature: float = 1.0,
        *,
        common: Cauchy | None = None,
    ) -> tuple[Tensor, Tensor]:
        """loc_S and scale_S, (..., V) each: noise widens the scale or, sampled, moves the location.

        Args:
            loc_U: (..., D).
            scale_U: (..., D).
            do_sample: Whether ε is drawn, by torch's generator, truncated by the configuration.
            temperature: T; scales the noise that is drawn, inert without sampling, 0 is noise-free.
            common: U₀, (...); none by default.
        """
        U = Cauchy(heads.exact(loc_U), heads.exact(scale_U))
        epsilon = None
        if do_sample:
            epsilon = standard_draw(torch.rand_like(U.loc), density_floor=self.config.density_floor)
        noisy = self.network.exogenous(
            U,
            do_sample=do_sample,
            temperature=temperature,
            noise_gain=self.config.noise_gain,
            epsilon=epsilon,
        )
        if common is None:
            zeros = torch.zeros_like(U.loc[..., 0])
            common = Cauchy(zeros, zeros)
        impl: heads.ScoresImpl = "reference" if torch.is_grad_enabled() else "fused"
        S = self.network.scores(noisy, common, self.lm_head.weight, impl=impl)
        return S.loc, S.scale


class OvRClassifier(nn.Module):
    """(loc_S, scale_S) → P_k = P(S_k > C_k). Modern: `causal_qwen.Cauchy.sf` at ``action.threshold``.

    Args:
        config: Sizes and start.
        threshold: C; a new one by default.
    """

    def __init__(self, config: CausalQwen2Config, *, threshold: nn.Parameter | None = None):
        super().__init__()
        if threshold is None:
            threshold = nn.Parameter(
                torch.full((config.vocab_size,), float(config.ovr_threshold_init)),
                requires_grad=config.learn_threshold,
            )
        self.thresholds = threshold

    def forward(self, loc_S: Tensor, scale_S: Tensor) -> Tensor:
        """P, (..., V); exact in both tails."""
        return Cauchy(heads.exact(loc_S), heads.exact(scale_S)).sf(heads.exact(self.thresholds))
