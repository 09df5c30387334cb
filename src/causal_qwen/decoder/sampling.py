"""From logits to a token: small pure functions, each equal to transformers' processor of the same name.

The order is theirs too: repetition penalty, temperature, top-k, top-p, softmax, draw. This module knows no
model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampling", "keep_top_k", "keep_top_p", "penalise_repetition", "tokens_so_far"]

# What logits of float32 can be multiplied and divided by.
SMALLEST, LARGEST = 1e-30, 1e30


def penalise_repetition(logits: Tensor, past_tokens: Tensor, penalty: float) -> Tensor:
    """Make past tokens less likely (penalty > 1): positive logits divided by it, negative multiplied.

    Args:
        logits: (B, V).
        past_tokens: (B, V), True at tokens that the row already contains.
        penalty: > 0; 1 changes nothing.
    """
    return torch.where(past_tokens, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def tokens_so_far(input_ids: Tensor, attention_mask: Tensor, vocab_size: int) -> Tensor:
    """(B, V), True at every token of the row that is not padding; both arguments are (B, T)."""
    counts = torch.zeros(input_ids.shape[0], vocab_size, dtype=torch.int32, device=input_ids.device)  # (B, V)
    return counts.scatter_add_(1, input_ids, attention_mask.int()) > 0


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """−inf below the k-th largest logit of each row (B, V); ties with it stay."""
    kth = logits.topk(min(k, logits.shape[-1])).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """−inf outside the smallest set of tokens whose probability reaches p; the largest always stays.

    Summed from the small end, where float32 keeps its digits: a token goes while the sum up to it is ≤ 1 − p.
    """
    ascending, order = logits.sort(dim=-1)  # (B, V) each
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    drop[:, -1] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: 0 is greedy, the argmax; above 0 divides the logits before the softmax that is sampled.
        top_k: Sample among the k most likely tokens only; None or 0 keeps all.
        top_p: Sample among the most likely tokens that together reach this probability; None or 1 keeps all.
        repetition_penalty: Above 1 makes tokens of the text so far less likely, greedy or not.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature is {self.temperature!r:.80}; it must be 0 (greedy) or positive and finite"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(
                f"top_k is {self.top_k!r:.80}; it must be at least 1, or None to keep all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p is {self.top_p!r:.80}; it must lie in (0, 1], or be None to keep all tokens"
            )
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty!r:.80}; it must be positive and finite, "
                "1 for none"
            )

    @property
    def needs_past_tokens(self) -> bool:
        """Whether :meth:`choose` wants to know the tokens so far."""
        return self.repetition_penalty != 1.0

    def process(self, logits: Tensor, past_tokens: Tensor | None = None) -> Tensor:
        """The logits that are compared or sampled, float32: (B, V) → (B, V)."""
        logits = logits.float()
        if past_tokens is not None:
            logits = penalise_repetition(logits, past_tokens, float(self.repetition_penalty))
        if self.temperature == 0:
            return logits
        logits = logits / float(self.temperature)  # below 1 sharpens the softmax, above 1 flattens it
        if self.top_k:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        return logits

    def choose(
        self, logits: Tensor, *, past_tokens: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """The next token of each row: (B, V) → (B,).

        Args:
            logits: (B, V).
            past_tokens: (B, V), as of `tokens_so_far`; needed when ``needs_past_tokens``.
            generator: Source of randomness; torch's own when None.
        """
        processed = self.process(logits, past_tokens)
        if self.temperature == 0:
            return processed.argmax(dim=-1)
        return torch.multinomial(processed.softmax(dim=-1), 1, generator=generator).squeeze(1)
