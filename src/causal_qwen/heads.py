"""The causal heads: numbers come in, causes are inferred, one linear law acts.

    e = embed(x) + φ(v)  →  backbone  →  z  →  AbductionNetwork  →  U, U₀  →  ActionNetwork  →  S, Y

The vocabulary matrix W is handed in: the heads own no (V, D) weight of their own. They know torch and the
Cauchy law, not transformers, tokenizers or decoding. All of their arithmetic is float32 at least, whatever
arrives.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causal_qwen.cauchy import Cauchy, magnitude
from causal_qwen.kernels.decision import TokenScorer
from causal_qwen.support import NumberSupport
from causal_qwen.value_space import signed_log1p

__all__ = [
    "NUM_BIAS",
    "AbductionNetwork",
    "ActionNetwork",
    "NumericEmbedding",
    "exact",
    "make_heads",
    "token_scores",
    "without_num_row",
]

ScaleActivation = Literal["exp", "softplus", "abs"]
InitStrategy = Literal["identity", "xavier", "normal"]
NumericEncoding = Literal["log", "sigmoid"]
ScoresImpl = Literal["reference", "fused"]

# scale_U stays within e^±40: far beyond use, yet its products with W neither overflow nor vanish in float32.
EXPONENT_BOUND = 40.0
# b_<NUM> before training. The <NUM> row starts as the mean of the digit rows, so its score never exceeds the
# best digit's, in any cause: with a negative bias no argmax can choose it. At −20 softmax gives it less than
# 2e-9 of that digit.
NUM_BIAS = -20.0


def exact(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, or as it is when it is already wider."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _float32(tensor: Tensor) -> torch.autocast:
    """Without autocast, which would take matrix products down to bfloat16."""
    return torch.autocast(tensor.device.type, enabled=False)


def without_num_row(logits: Tensor, num_token_id: int | None) -> Tensor:
    """``logits`` (..., V) as the base has them: without the <NUM> row, where conversion added it at the end.

    That it cannot be chosen is not enough: it must not take part in the random draws of a sampler either.
    """
    return logits[..., :-1] if num_token_id == logits.shape[-1] - 1 else logits


def token_scores(
    U: Cauchy,
    U0: Cauchy,
    weight: Tensor,
    *,
    bias: Tensor,
    balance: Tensor,
    impl: ScoresImpl = "reference",
) -> Cauchy:
    """S ~ Cauchy(W loc_U + b + loc_U0, |W| scale_U + balance·mean(scale_U) + scale_U0), (..., V).

    Args:
        U: U', (..., D).
        U0: Common cause, (...).
        weight: W, (V, D), any float dtype.
        bias: (V,) b.
        balance: (V,) ≥ 0.
        impl: "reference" is the equation, with gradients. "fused" reads W once and has none.

    Raises:
        ValueError: If gradients are wanted of "fused".
    """
    if impl == "fused":
        laws = (U.loc, U.scale, U0.loc, U0.scale)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*laws, weight, bias, balance)):
            raise ValueError("impl='fused' gives no gradients; use 'reference', or torch.no_grad()")
        return Cauchy(*TokenScorer(weight, bias=bias, balance=balance).scores(*laws))
    with _float32(U.loc):
        S = U.linear(exact(weight), bias)
    read_out = balance * U.scale.mean(-1, keepdim=True)  # (..., V)
    return Cauchy(S.loc + U0.loc.unsqueeze(-1), S.scale + read_out + U0.scale.unsqueeze(-1))


class NumericEmbedding(nn.Module):
    """Adds what a number is worth to what its token means.

    "log": embed(x) + sign(v)·ln(1 + |v|)·ê with ‖ê‖ = 1. φ(0) = 0, so other positions are untouched.
    "sigmoid": embed(x)·sigmoid(v) where the token is a number.

    Args:
        hidden_size: H.
        encoding: "log" or "sigmoid".
        learn_direction: Whether ê is trained.
    """

    def __init__(
        self, hidden_size: int, *, encoding: NumericEncoding = "log", learn_direction: bool = False
    ) -> None:
        super().__init__()
        self.encoding = encoding
        self.direction = nn.Parameter(
            torch.empty(hidden_size, dtype=torch.float32), requires_grad=learn_direction
        )
        self.reset_parameters()

    def reset_parameters(self, init: ModuleType = nn.init) -> None:
        """Draw ê from N(0, 0.02²); forward normalises it."""
        init.normal_(self.direction, std=0.02)

    def forward(self, embeds: Tensor, values: Tensor, is_number: Tensor) -> Tensor:
        """Embeddings (B, T, H) with the values (B, T) of the positions marked by ``is_number`` (B, T) read
        in.
        """
        if self.encoding == "sigmoid":
            gain = torch.where(is_number, torch.sigmoid(values), 1.0)  # (B, T)
            return embeds * gain.to(embeds.dtype).unsqueeze(-1)
        phi = torch.where(is_number, signed_log1p(values), 0.0)  # (B, T)
        direction = F.normalize(exact(self.direction), dim=0)
        return embeds + (phi.to(direction.dtype).unsqueeze(-1) * direction).to(embeds.dtype)


class AbductionNetwork(nn.Module):
    """z → U ~ Cauchy(W_loc z + b_loc, activation(W_scale z + b_scale)) and U₀ ~ Cauchy(−(a·z + c), scale_U0).

    Args:
        hidden_size: H.
        causal_size: D.
        scale_activation: What keeps scale_U positive: "exp", "softplus" or "abs".
    """

    def __init__(
        self, hidden_size: int, causal_size: int, *, scale_activation: ScaleActivation = "exp"
    ) -> None:
        super().__init__()
        self.scale_activation = scale_activation
        self.loc = nn.Linear(hidden_size, causal_size, dtype=torch.float32)
        self.scale = nn.Linear(hidden_size, causal_size, dtype=torch.float32)
        self.common = nn.Linear(hidden_size, 1, dtype=torch.float32)  # a and c
        self.common_scale = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(
        self, init: ModuleType = nn.init, *, gamma: float = 10.0, strategy: InitStrategy = "identity"
    ) -> None:
        """Knowledge transfer: loc_U = z, scale_U = γ everywhere, no common cause."""
        if strategy == "identity":
            init.eye_(self.loc.weight)
        elif strategy == "xavier":
            init.xavier_uniform_(self.loc.weight)
        else:
            init.normal_(self.loc.weight, std=0.02)
        init.zeros_(self.loc.bias)
        init.zeros_(self.scale.weight)
        init.constant_(self.scale.bias, self.inverse_activation(gamma))
        init.zeros_(self.common.weight)
        init.zeros_(self.common.bias)
        init.zeros_(self.common_scale)

    def inverse_activation(self, gamma: float) -> float:
        """The b_scale at which scale_U = gamma."""
        if self.scale_activation == "exp":
            return math.log(gamma)
        if self.scale_activation == "softplus":
            return gamma + math.log(-math.expm1(-gamma))
        return gamma

    def activation(self, pre: Tensor) -> Tensor:
        """A scale from any real number, bounded away from 0 and from overflow."""
        if self.scale_activation == "exp":
            return pre.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()
        if self.scale_activation == "softplus":
            return F.softplus(pre.clamp(min=-EXPONENT_BOUND))
        return magnitude(pre).clamp(min=math.exp(-EXPONENT_BOUND))

    def forward(self, hidden_states: Tensor) -> tuple[Cauchy, Cauchy]:
        """The individual U (..., D) and the common cause U₀ (...) of features (..., H)."""
        z = exact(hidden_states)
        with _float32(z):
            loc_U = F.linear(z, exact(self.loc.weight), exact(self.loc.bias))  # (..., D)
            pre = F.linear(z, exact(self.scale.weight), exact(self.scale.bias))  # (..., D)
            common = F.linear(z, exact(self.common.weight), exact(self.common.bias))  # (..., 1)
        loc_U0 = -common.squeeze(-1)
        U0 = Cauchy(loc_U0, exact(magnitude(self.common_scale)).expand_as(loc_U0))
        return Cauchy(loc_U, self.activation(pre)), U0

    def stacked(self) -> tuple[Tensor, Tensor]:
        """The three linear maps as one: weight (2D + 1, H) and bias (2D + 1,), float32, without gradients."""
        maps = (self.loc, self.scale, self.common)
        weight, bias = (torch.cat([exact(getattr(m, name)) for m in maps]) for name in ("weight", "bias"))
        return weight.detach(), bias.detach()


class ActionNetwork(nn.Module):
    """U → the token scores S and the number Y, by one linear law.

    loc_S = W loc_U' + b + loc_U0;  scale_S = |W| scale_U' + balance·mean(scale_U') + scale_U0
    loc_Y = w·loc_U' + b_Y;         scale_Y = |w|·scale_U' + |β_Y|

    Args:
        vocab_size: V.
        causal_size: D.
        learn_threshold: Whether the One-vs-Rest thresholds C are trained.
        folds: K, number heads that were each solved without a part of the rows, for intervals.
        support_rank: Directions in which the number head has seen features; 0 before it is solved.
    """

    def __init__(
        self,
        vocab_size: int,
        causal_size: int,
        *,
        learn_threshold: bool = True,
        folds: int = 0,
        support_rank: int = 0,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size, dtype=torch.float32))
        self.balance = nn.Parameter(torch.empty(vocab_size, dtype=torch.float32))
        self.threshold = nn.Parameter(
            torch.empty(vocab_size, dtype=torch.float32), requires_grad=learn_threshold
        )
        self.b_noise = nn.Parameter(torch.empty(causal_size, dtype=torch.float32))
        self.number = nn.Linear(causal_size, 1, dtype=torch.float32)  # w and b_Y
        self.number_noise = nn.Parameter(torch.empty((), dtype=torch.float32))  # β_Y
        self.support = NumberSupport(causal_size, support_rank)
        self.keep_folds(torch.zeros(folds, causal_size), torch.zeros(folds))
        self.reset_parameters()

    def reset_parameters(
        self, init: ModuleType = nn.init, *, b_noise: float = 0.1, threshold: float = 0.0, jitter: float = 0.0
    ) -> None:
        """No read-out noise, one threshold for all tokens (spread by ±jitter), a small number head."""
        init.zeros_(self.bias)
        init.zeros_(self.balance)
        if jitter:
            init.uniform_(self.threshold, threshold - jitter, threshold + jitter)
        else:
            init.constant_(self.threshold, threshold)
        init.constant_(self.b_noise, b_noise)
        init.xavier_uniform_(self.number.weight)
        init.zeros_(self.number.bias)
        init.zeros_(self.number_noise)

    def exogenous(
        self,
        U: Cauchy,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        noise_gain: float = 1.0,
        epsilon: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Cauchy:
        """U' = U with the exogenous noise b_noise: it widens the scale, or, sampled, it moves the location.

        Args:
            U: The individual, (..., D).
            do_sample: False: Cauchy(loc_U, scale_U + |b_noise|), where any temperature but 0 is inert.
                True: Cauchy(loc_U + T·κ·|b_noise|·ε, scale_U).
            temperature: T ≥ 0. 0 is the noise-free law, U itself.
            noise_gain: κ.
            epsilon: Standard Cauchy draws (..., D), required with ``do_sample``.
            noise: |b_noise| (D,), where it is at hand.

        Raises:
            ValueError: If the temperature is negative or not finite, or ``epsilon`` is missing.
        """
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(
                f"temperature is {temperature!r}; it scales noise and must be a finite number ≥ 0"
            )
        if temperature == 0:
            return U
        if noise is None:
            noise = exact(magnitude(self.b_noise))
        if not do_sample:
            return Cauchy(U.loc, U.scale + noise)
        if epsilon is None:
            raise ValueError("do_sample=True moves the cause by epsilon; pass the draws, shaped like loc_U")
        return Cauchy(torch.addcmul(U.loc, noise, epsilon, value=temperature * noise_gain), U.scale)

    def scores(
        self,
        U: Cauchy,
        U0: Cauchy,
        weight: Tensor,
        rows: Tensor | slice | None = None,
        *,
        impl: ScoresImpl = "reference",
    ) -> Cauchy:
        """S for all tokens, or for some ``rows`` of W only, token ids (K,); else as `token_scores`."""
        bias, balance = exact(self.bias), exact(magnitude(self.balance))  # (V,)
        if rows is not None:
            weight, bias, balance = weight[rows], bias[rows], balance[rows]
        return token_scores(U, U0, weight, bias=bias, balance=balance, impl=impl)

    def z_scores(self, S: Cauchy) -> Tensor:
        """(loc_S − C)/scale_S: ordered as P(S > C), without the ties of a saturated probability."""
        return (S.loc - exact(self.threshold)) / S.scale

    def numbers(self, U: Cauchy) -> Cauchy:
        """Y for U' (..., D), shape (...)."""
        with _float32(U.loc):
            Y = U.linear(exact(self.number.weight), exact(self.number.bias))  # (..., 1)
        return Cauchy(Y.loc.squeeze(-1), Y.scale.squeeze(-1) + exact(magnitude(self.number_noise)))

    def keep_folds(self, slopes: Tensor, intercepts: Tensor) -> None:
        """Number heads (K, D) and (K,) that were each solved without a fold; saved where there are any."""
        self.fold_slopes: Tensor
        self.fold_intercepts: Tensor
        self.register_buffer("fold_slopes", slopes.float(), persistent=len(slopes) > 0)
        self.register_buffer("fold_intercepts", intercepts.float(), persistent=len(slopes) > 0)

    def keep_support(self, support: NumberSupport) -> None:
        """What the number head has seen; a method, which an adapter's wrapper hands on."""
        self.support = support

    def fold_numbers(self, U: Cauchy) -> Tensor:
        """loc_Y of U' (..., D) by the head without each fold, (..., K)."""
        with _float32(U.loc):
            return F.linear(U.loc, exact(self.fold_slopes), exact(self.fold_intercepts))

    @torch.no_grad()
    def resize(self, weight: Tensor) -> None:
        """Make b, balance and C follow a resized W (V', D).

        A new token starts without bias, with the median threshold, and with the balance that gives it the
        median read-out scale, so that it is neither favoured nor held back.
        """
        old, new = self.bias.shape[0], weight.shape[0]
        if new == old:
            return
        kept, added = min(old, new), max(new - old, 0)
        norms = exact(weight).abs().sum(-1)  # (V',)
        balance = magnitude(self.balance)[:kept]
        total = (norms[:kept] + balance).median()
        new_balance = (total - norms[kept:]).clamp(min=0) if balance.any() else balance.new_zeros(added)
        rows = {
            "bias": self.bias.new_zeros(added),
            "balance": new_balance,
            "threshold": self.threshold.median().expand(added),
        }
        for name, tail in rows.items():
            parameter = getattr(self, name)
            resized = torch.cat([parameter[:kept], tail.to(parameter)])
            setattr(self, name, nn.Parameter(resized, requires_grad=parameter.requires_grad))


def make_heads(config: Any) -> tuple[NumericEmbedding, AbductionNetwork, ActionNetwork]:
    """The heads that a configuration with the fields of `CausalFields` describes."""
    numeric_embedding = NumericEmbedding(
        config.hidden_size,
        encoding=config.numeric_encoding,
        learn_direction=config.learn_numeric_direction,
    )
    abduction = AbductionNetwork(
        config.hidden_size, config.causal_size, scale_activation=config.scale_activation
    )
    action = ActionNetwork(
        config.vocab_size,
        config.causal_size,
        learn_threshold=config.learn_threshold,
        folds=config.number_folds,
        support_rank=config.number_support,
    )
    return numeric_embedding, abduction, action
