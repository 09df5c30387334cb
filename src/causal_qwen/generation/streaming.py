"""Streaming: text as it is generated, with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from causal_qwen.generation.decisions import Choice
from causal_qwen.generation.spelling import Speller, spelled
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["NumberStreamer", "SpelledStream"]


class NumberStreamer(TextStreamer):
    """A TextStreamer for any model that writes numbers, also one whose configuration has no spelling of them:
    this is the processor's.

    Args:
        processor: Knows how numbers are spelled.
        skip_prompt: Whether the prompt is left out.
        **decode_kwargs: For the tokenizer, such as ``skip_special_tokens``.
    """

    def __init__(
        self, processor: CausalQwen2Processor, skip_prompt: bool = False, **decode_kwargs: Any
    ) -> None:
        super().__init__(processor.tokenizer, skip_prompt=skip_prompt, **decode_kwargs)
        self.spelling = processor.spelling


class SpelledStream:
    """What a streamer gets: the prompt, then token after token, with numbers in digits.

    Where nobody knows how they are spelled, and in batches, tokens pass as they are.

    Args:
        streamer: Anybody's.
        config: Of the model, with ``num_token_id`` and ``number_spelling``.
    """

    def __init__(self, streamer: BaseStreamer, config: Any) -> None:
        self.streamer, self._num = streamer, config.num_token_id
        spelling = streamer.spelling if isinstance(streamer, NumberStreamer) else config.number_spelling
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
