"""transformers' streamers, for models that write numbers."""

from __future__ import annotations

from typing import Any

from transformers import TextStreamer

from causal_qwen.generation.streaming import SpellsNumbers
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["NumberStreamer"]


class NumberStreamer(SpellsNumbers, TextStreamer):
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
