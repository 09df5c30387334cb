"""What settings do to logits: transformers' processors of the same names, without transformers.

Each is one function of ``decoder.sampling``, which equals theirs; the order is theirs too. This module knows
no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from causal_qwen.decoder.sampling import keep_top_k, keep_top_p, penalise_repetition
from causal_qwen.generation.protocol import Processors

__all__ = ["RepetitionPenalty", "Suppression", "Temperature", "TopK", "TopP", "processors_of"]


class SamplingSettings(Protocol):
    """What `processors_of` reads."""

    @property
    def do_sample(self) -> bool:
        """Whether to sample."""
        ...

    @property
    def repetition_penalty(self) -> float | None:
        """Of tokens so far."""
        ...

    @property
    def temperature(self) -> float | None:
        """T."""
        ...

    @property
    def top_k(self) -> int | None:
        """The k best tokens alone."""
        ...

    @property
    def top_p(self) -> float | None:
        """The nucleus of this probability alone."""
        ...


@dataclass(frozen=True)
class RepetitionPenalty:
    """Tokens of prompt and text made less likely."""

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.penalty!r}; it must be a finite number above 0")

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """(B, T) ids and (B, V) logits → (B, V)."""
        past = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, input_ids, True)
        return penalise_repetition(logits, past, self.penalty)


@dataclass(frozen=True)
class Temperature:
    """Logits divided by T."""

    temperature: float

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature!r}; it must be a finite number above 0")

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """(B, V) → (B, V)."""
        return logits / self.temperature


@dataclass(frozen=True)
class TopK:
    """The k best tokens alone."""

    k: int

    def __post_init__(self) -> None:
        if not self.k >= 1:
            raise ValueError(f"top_k is {self.k!r}; it must be at least 1")

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """(B, V) → (B, V)."""
        return keep_top_k(logits, self.k)


@dataclass(frozen=True)
class TopP:
    """The nucleus of probability p alone."""

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"top_p is {self.p!r}; it must be above 0 and at most 1")

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """(B, V) → (B, V)."""
        return keep_top_p(logits, self.p)


@dataclass(frozen=True)
class Suppression:
    """No token from ``first`` on."""

    first: int

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """(B, V) → (B, V)."""
        return logits.index_fill(
            1, torch.arange(self.first, logits.shape[-1], device=logits.device), -torch.inf
        )


def processors_of(settings: SamplingSettings) -> Processors:
    """Those that change something."""
    return list(_processors(settings))


def _processors(settings: SamplingSettings) -> Iterator[RepetitionPenalty | Temperature | TopK | TopP]:
    if settings.repetition_penalty is not None and settings.repetition_penalty != 1.0:
        yield RepetitionPenalty(settings.repetition_penalty)
    if not settings.do_sample:
        return
    if settings.temperature is not None and settings.temperature != 1.0:
        yield Temperature(settings.temperature)
    if settings.top_k:
        yield TopK(settings.top_k)
    if settings.top_p is not None and settings.top_p < 1.0:
        yield TopP(settings.top_p)
