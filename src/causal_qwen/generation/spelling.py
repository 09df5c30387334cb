"""Numbers in token ids: each <NUM> that was generated, as the tokens of its digits.

Ids alone must say everything: pipelines, servers and streamers decode them with a tokenizer that knows no
values. Who wants <NUM> and its value asks for ``return_dict_in_generate=True``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from causal_qwen.numbers import spread_of
from causal_qwen.writing import Writer

__all__ = ["Speller", "spelled"]

# Stands for any token that is not a character of numbers: no rule about numbers speaks of it.
OTHER = "\ufffc"


class Speller:
    """Tokens in, tokens out, one text from left to right; numbers come out in digits, as `Writer` has them.

    Args:
        spelling: The token of each character of `CausalQwen2Processor.spelling`.
    """

    def __init__(self, spelling: Mapping[str, int]) -> None:
        self._tokens, self._characters = spelling, {token: text for text, token in spelling.items()}
        self._writer, self._others = Writer(), deque[int]()

    def add(self, token: int) -> list[int]:
        """Take a token that is no number; returns what can be handed out."""
        character = self._characters.get(token, OTHER)
        if character == OTHER:
            self._others.append(token)
        return self._handed_out(self._writer.add(character))

    def add_number(self, value: float, lower: float, upper: float) -> list[int]:
        """Take a number, rounded to what its interval supports; returns what can be handed out."""
        return self._handed_out(self._writer.add_number(value, spread_of(lower, upper)))

    def end(self) -> list[int]:
        """What has waited."""
        return self._handed_out(self._writer.end())

    def _handed_out(self, text: str) -> list[int]:
        return [
            self._others.popleft() if character == OTHER else self._tokens[character] for character in text
        ]


def spelled(
    ids: Tensor,
    numbers: Sequence[Tensor],
    *,
    num_token_id: int,
    spelling: Mapping[str, int],
    pad_token_id: int,
    start: int = 0,
) -> Tensor:
    """Ids (B, T'), with every number from column ``start`` on in digits, and padding on the right.

    Args:
        ids: (B, T).
        numbers: Values, lower and upper ends, (B, T) each.
        num_token_id: <NUM>.
        spelling: As for `Speller`.
        pad_token_id: What fills a row.
        start: Where the generated tokens begin; what stands before is the prompt, and stays as it is.
    """
    rows = []
    columns = [column[:, start:].tolist() for column in numbers]
    for tokens, *values in zip(ids[:, start:].tolist(), *columns, strict=True):
        speller, row = Speller(spelling), list[int]()
        for token, *number in zip(tokens, *values, strict=True):
            row += speller.add_number(*number) if token == num_token_id else speller.add(token)
        rows.append(row + speller.end())
    longest = max(map(len, rows))
    said = torch.tensor([row + [pad_token_id] * (longest - len(row)) for row in rows], dtype=ids.dtype)
    return torch.cat([ids[:, :start], said.to(ids.device)], dim=1)
