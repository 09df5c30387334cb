"""What generate() returns: transformers' output, and the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from causal_qwen.generation.decoding import NumberedTexts
from causal_qwen.individual import Individual

__all__ = ["CausalGenerateOutput"]


@dataclass
class CausalGenerateOutput(NumberedTexts, GenerateDecoderOnlyOutput):
    """transformers' output, and the numbers.

    Args:
        numeric_values: (B, T) value at each <NUM> of ``sequences``, 0 elsewhere; float64.
        numeric_lower: (B, T) lower end of its interval; equal to the value in the prompt.
        numeric_upper: (B, T) upper end of its interval.
        numeric_extrapolates: (B, T) 1 where it lies beyond what training has seen, NaN where nobody knows.
        individuals: Who decided each row, where noise was drawn: pass them to generate() again for the same
            text.
    """

    numeric_values: Tensor | None = None
    numeric_lower: Tensor | None = None
    numeric_upper: Tensor | None = None
    numeric_extrapolates: Tensor | None = None
    individuals: list[Individual] | None = None
