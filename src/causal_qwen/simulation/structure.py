"""The known world: features h(x), individuals, and what one linear law makes of them.

Each individual is drawn, u ~ Cauchy(M h, s(h)) with s(h) = exp(c·h + c₀) in every dimension, and then acts:

    the next token is <NUM>     where  W_<NUM>·u + b_<NUM> > 0
    otherwise it is the word           argmax_k W_k·u
    and the number is                  Y = w·u + b_Y

<NUM>, words and numbers read different dimensions of u, so that whether a number comes says nothing about how
large it is. Y and P_<NUM> then have exactly the laws that the heads state, and their parameters can be
recovered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy

__all__ = ["Individuals", "StructuralModel"]


@dataclass(frozen=True)
class Individuals:
    """What is seen of N individuals."""

    features: Tensor  # (N, H) h(x)
    labels: Tensor  # (N,) next tokens
    values: Tensor  # (N,) their numbers, meaningful where the label is <NUM>


class StructuralModel:
    """Random true parameters; each part of u has ``part_size`` dimensions.

    Args:
        hidden_size: H.
        words: Tokens besides <NUM>, which comes last.
        part_size: Dimensions of u for numbers, for <NUM> and for words.
        seed: Of the parameters.
    """

    def __init__(self, *, hidden_size: int = 8, words: int = 6, part_size: int = 3, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.hidden_size, self.words, self.size = hidden_size, words, 3 * part_size
        self.vocab_size, self.num_token_id = words + 1, words
        number, gate, word = (slice(part * part_size, (part + 1) * part_size) for part in range(3))
        self.M = torch.randn(self.size, hidden_size, generator=draw) / hidden_size**0.5
        self.c = 0.3 * torch.randn(hidden_size, generator=draw) / hidden_size**0.5
        self.c0 = -3.0
        self.w = torch.zeros(self.size)
        self.w[number] = torch.randn(part_size, generator=draw)
        self.b_Y = 2.0
        self.W = torch.zeros(self.vocab_size, self.size)
        self.W[words, gate] = torch.randn(part_size, generator=draw)
        self.W[:words, word] = torch.randn(words, part_size, generator=draw)
        self.b_num = -0.3

    def U(self, features: Tensor) -> Cauchy:
        """The individual's law, (N, D)."""
        scale = (features @ self.c + self.c0).exp()[:, None]
        return Cauchy(features @ self.M.T, scale.expand(-1, self.size))

    def Y(self, features: Tensor) -> Cauchy:
        """The number's law, (N,)."""
        Y = self.U(features).linear(self.w[None])
        return Cauchy(Y.loc.squeeze(-1) + self.b_Y, Y.scale.squeeze(-1))

    def prob_num(self, features: Tensor) -> Tensor:
        """P_<NUM>, (N,)."""
        S = self.U(features).linear(self.W[self.num_token_id :])
        return S.sf(torch.tensor(-self.b_num)).squeeze(-1)

    def act(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Token and number of concrete individuals (N, D)."""
        scores = u @ self.W.T  # (N, V)
        is_num = scores[:, self.num_token_id] + self.b_num > 0
        tokens = torch.where(is_num, self.num_token_id, scores[:, : self.words].argmax(-1))
        return tokens, u @ self.w + self.b_Y

    def draw(self, count: int, *, seed: int) -> Individuals:
        """``count`` individuals with standard normal features."""
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(count, self.hidden_size, generator=generator)
        tokens, values = self.act(self.U(features).rsample(generator=generator))
        return Individuals(features, tokens, values)

    def best_accuracy(self, features: Tensor, *, draws: int = 200, seed: int = 0) -> float:
        """The accuracy of whoever knows this model: of the most frequent token among many individuals."""
        generator = torch.Generator().manual_seed(seed)
        law = self.U(features)
        counts = torch.zeros(len(features), self.vocab_size)
        rows = torch.arange(len(features))
        for _ in range(draws):
            tokens, _ = self.act(law.rsample(generator=generator))
            counts[rows, tokens] += 1
        return float((counts.max(-1).values / draws).mean())
