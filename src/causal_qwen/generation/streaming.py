"""Streaming: tokens as they are generated, with their numbers in digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from causal_qwen.generation.decisions import Choice
from causal_qwen.generation.protocol import Streamer
from causal_qwen.generation.spelling import Speller, spelled

__all__ = ["SpelledStream", "SpellsNumbers"]


class SpellsNumbers:
    """Goes before a streamer that knows how numbers are spelled, whatever a configuration says.

    Attributes:
        spelling: The token of each character; None where a character has none.
    """

    spelling: dict[str, int] | None


class SpelledStream:
    """What a streamer gets: the prompt, then token after token, with numbers in digits.

    Where nobody knows how they are spelled, and in batches, tokens pass as they are.

    Args:
        streamer: Anybody's.
        config: Of the model, with ``num_token_id`` and ``number_spelling``.
    """

    def __init__(self, streamer: Streamer, config: Any) -> None:
        self.streamer, self._num = streamer, config.num_token_id
        spelling = streamer.spelling if isinstance(streamer, SpellsNumbers) else config.number_spelling
        self._spelling = None if self._num is None else spelling
        self._speller = None if self._spelling is None else Speller(self._spelling)

    def prompt(self, ids: Tensor, numbers: Sequence[Tensor | None]) -> None:
        """Put the prompts (B, T), with their values, lower and upper ends."""
        values = [column for column in numbers if column is not None]
        if self._spelling is not None and values and len(ids) == 1:
            ids = spelled(ids, values, num_token_id=self._num, spelling=self._spelling, pad_token_id=0)
        self.streamer.put(ids.cpu())

    def add(self, tokens: Tensor, choice: Choice) -> None:
        """Put one token per row, (B,), with the number that was decided should it be <NUM>."""
        if self._speller is None or len(tokens) > 1:
            self.streamer.put(tokens.cpu())
            return
        token = int(tokens.item())
        if token == self._num:
            self._put(self._speller.add_number(*(part.item() for part in choice.numbers[:3])))
        else:
            self._put(self._speller.add(token))

    def end(self) -> None:
        """Put what has waited, and end the text."""
        if self._speller is not None:
            self._put(self._speller.end())
        self.streamer.end()

    def _put(self, tokens: list[int]) -> None:
        if tokens:
            self.streamer.put(torch.tensor(tokens))
