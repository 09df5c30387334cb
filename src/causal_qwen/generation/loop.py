"""The one loop: prefill, then decide and step for as long as somebody asks.

`steps` drives a `Stepper` and a `Decision` and yields what was inferred and chosen. generate(), the
`Inferencer`, counterfactuals and abduction's replay consume it; each ends texts by its own rules. It knows no
tokenizer and no stopping criterion.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from causal_qwen.cauchy import Cauchy
from causal_qwen.generation.decisions import Choice, Decision
from causal_qwen.generation.protocol import Processors
from causal_qwen.generation.readout import ReadOut
from causal_qwen.generation.stepping import Stepper

__all__ = ["Inference", "Texts", "steps"]


@dataclass(frozen=True, slots=True)
class Inference:
    """What is inferred and decided at one position.

    Args:
        U: The individual, (B, D).
        U0: The common cause, (B,).
        choice: The decision: tokens, values with intervals, and the scores behind them.
        tokens: (B,) what the texts got: the chosen tokens, and padding in rows that have ended.
        readout: The heads that decided.
    """

    U: Cauchy
    U0: Cauchy
    choice: Choice
    tokens: Tensor
    readout: ReadOut = field(repr=False)

    @property
    def Y(self) -> Cauchy:
        """The number in value space, (B,), of the widened cause."""
        return self.readout.number(self.U)


class Texts:
    """A batch of growing texts, the values of their numbers, and which of them have ended.

    Numbers are kept from the first one on, so that plain text is free.

    Args:
        input_ids: (B, T) prompts.
        numeric_values: (B, T) the values at their <NUM> tokens; None where none has one.
        num_token_id: <NUM>; None for a model without numbers.
        pad_token_id: What rows that have ended get; None lets them go on.

    Attributes:
        ids: (B, T) all tokens so far.
        ended: (B,) bool.
    """

    def __init__(
        self,
        input_ids: Tensor,
        numeric_values: Tensor | None = None,
        *,
        num_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        self.ids = input_ids
        self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self._num, self._pad = num_token_id, pad_token_id
        has_number = num_token_id is not None and bool((input_ids == num_token_id).any())
        # (4, B, T): values, lower and upper ends of their intervals, 1 where they extrapolate
        self._numbers = None
        if has_number and numeric_values is not None:
            known = torch.zeros_like(numeric_values)  # a prompt's numbers are given
            self._numbers = torch.stack([numeric_values, numeric_values, numeric_values, known])

    @property
    def numbers(self) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """Values, lower ends and upper ends, (B, T) each, 0 where there is no number."""
        rows = self._numbers
        return (None, None, None) if rows is None else (rows[0], rows[1], rows[2])

    @property
    def extrapolates(self) -> Tensor | None:
        """(B, T) 1 where a number lies beyond what training has seen, NaN where nobody knows, else 0."""
        return None if self._numbers is None else self._numbers[3]

    def append(self, choice: Choice) -> Tensor:
        """Add what was decided, and return the tokens that were added, (B,)."""
        tokens = choice.tokens
        if self._pad is not None:
            tokens = torch.where(self.ended, self._pad, tokens)
        self._append_numbers(choice, tokens)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        return tokens

    def _append_numbers(self, choice: Choice, tokens: Tensor) -> None:
        if self._numbers is None:
            if self._num is None or self._num not in tokens.tolist():
                return
            self._numbers = choice.values.new_zeros(4, *self.ids.shape)
        *laws, extrapolates = choice.numbers
        unknown = torch.full_like(choice.values, torch.nan)
        flags = unknown if extrapolates is None else extrapolates.to(unknown)
        is_num = tokens.eq(-1 if self._num is None else self._num)
        column = torch.where(is_num, torch.stack([*laws, flags]), 0.0)  # (4, B)
        self._numbers = torch.cat([self._numbers.to(column), column[..., None]], dim=-1)

    def end(self, rows: Tensor | bool) -> None:
        """End some rows, (B,), or all."""
        self.ended |= rows

    @property
    def padded(self) -> Tensor | None:
        """(B,) rows that get nothing but padding from here on; None where rows that have ended go on."""
        return None if self._pad is None else self.ended

    @property
    def all_ended(self) -> bool:
        """Whether nothing is left to continue."""
        return all(self.ended.tolist())


def steps(
    stepper: Stepper, decision: Decision, texts: Texts, processors: Processors = ()
) -> Iterator[Inference]:
    """Decide token after token, each with its laws, and feed tokens and numbers back; it has no end.

    Args:
        stepper: Of the model, without a text yet.
        decision: With an individual per row, where noise is drawn.
        texts: The prompts; they grow in place. Whoever consumes this ends rows in it.
        processors: On the logits, as in `Decision.choose`.
    """
    causes = stepper.prefill(texts.ids, texts.numbers[0])
    for position in itertools.count():
        choice = decision.choose(stepper.readout, causes, texts.ids, position, processors)
        tokens = texts.append(choice)
        yield Inference(causes.U, causes.U0, choice, tokens, stepper.readout)
        values = texts.numbers[0]
        causes = stepper.step(tokens, None if values is None else values[:, -1], texts.padded)
