"""Streaming: text as it is generated, with its numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TextStreamer

from causal_qwen.generation.decisions import Choice
from causal_qwen.numbers import format_number, spread_of
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["NumberStreamer"]


class NumberStreamer(TextStreamer):
    """A TextStreamer that writes the value of each <NUM>, rounded to what its interval supports.

    Args:
        processor: Knows <NUM> and how to write it.
        skip_prompt: Whether the prompt is left out.
        **decode_kwargs: For the tokenizer, such as ``skip_special_tokens``.
    """

    token_cache: list[int]
    print_len: int

    def __init__(
        self, processor: CausalQwen2Processor, skip_prompt: bool = False, **decode_kwargs: Any
    ) -> None:
        super().__init__(processor.tokenizer, skip_prompt=skip_prompt, **decode_kwargs)
        self.processor = processor

    def put_choice(self, tokens: Tensor, choice: Choice) -> None:
        """Take one token of one row, with the number that was decided should it be <NUM>."""
        if tokens.item() != self.processor.num_token_id:
            self.put(tokens)
            return
        if self.token_cache:  # a number begins a new piece of text
            text = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
            self.on_finalized_text(text[self.print_len :])
            self.token_cache, self.print_len = [], 0
        value, lower, upper = (part.item() for part in choice.numbers)
        self.on_finalized_text(format_number(value, spread_of(lower, upper)))
