"""Digits as text, and Gumbel noise that is abducted and replayed: what the literature does with any model.

The base reads some training rows and a factual row with its number. At each digit the Gumbel noise under
which it wins is drawn from its law given that it has; the same noise then decides the digits that follow the
other prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peers import MOST_DIGITS, DigitsAsText, as_number

END = "\n"


class Question(NamedTuple):
    """A factual row, its number, and the row that it might have been; rows end before their number."""

    factual: str
    observed: str
    other: str


class GumbelReplay(DigitsAsText):
    """Answers to questions, by digits."""

    @torch.no_grad()
    def answers(self, lines: Sequence[str], questions: Sequence[Question], seed: int) -> list[float]:
        """The number after each other prompt; NaN where the text is none."""
        context = self._ids("".join(f"{line}{END}" for line in lines))
        longest = max(len(self._ids(text)) for question in questions for text in question)
        cache = self.engine.new_cache(1, len(context) + 2 * longest + MOST_DIGITS)
        self.engine.hidden(torch.tensor([context]), None, cache)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for question in questions:
            cache.length = len(context)
            prompt, digits = self._ids(question.factual), self._ids(f" {question.observed}{END}")
            states = self.engine.hidden(torch.tensor([prompt + digits]), None, cache)
            logits = self.engine.head(states[0, len(prompt) - 1 : -1])  # (n, V)
            noise = gumbel_given(logits, torch.tensor(digits), generator)
            cache.length = len(context)
            found.append(as_number(self._replay(question.other, noise, cache, generator)))
        return found

    def _replay(self, prompt: str, noise: Tensor, cache: Any, generator: torch.Generator) -> str:
        tokens, written = torch.tensor([self._ids(prompt)]), []
        for step in range(MOST_DIGITS):
            logits = self.engine.head(self.engine.hidden(tokens, None, cache)[0, -1])
            own = noise[step] if step < len(noise) else gumbel(logits.shape, generator)
            best = int((logits + own).argmax())
            written.append(best)
            tokens = torch.tensor([[best]])
        return str(self.tokenizer.decode(written))


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard Gumbel draws."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-12)
    return -(-uniform.log()).log()


def gumbel_given(logits: Tensor, winners: Tensor, generator: torch.Generator) -> Tensor:
    """Noise (n, V) for which each winner (n,) has the largest logit (n, V) plus noise, by its law given that.

    The largest sum is Gumbel around the logarithm of the sum of exponentials; all others are Gumbel truncated
    to lie below it.
    """
    logits = logits.double()
    rows = torch.arange(len(winners))
    top = logits.logsumexp(-1) + gumbel(winners.shape, generator)  # (n,)
    free = logits + gumbel(logits.shape, generator)
    below = -torch.logaddexp(-free, -top[:, None])
    below[rows, winners] = top
    return below - logits


def replaced(answers: Sequence[float], instead: float) -> tuple[list[float], int]:
    """Answers with a number in the place of those that are none, and how many were."""
    missing = [math.isnan(answer) for answer in answers]
    return [instead if gone else answer for answer, gone in zip(answers, missing, strict=True)], sum(missing)
