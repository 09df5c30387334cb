"""Base checkpoints → CausalQwen: sources, vocabulary, transfer, and the proof that nothing changed."""

from causal_qwen.conversion.parity import Parity, measure_parity
from causal_qwen.conversion.sources import EMBEDDED, Base, ConversionError, load_base
from causal_qwen.conversion.transfer import Conversion, bundled_text, convert, load_model

__all__ = [
    "EMBEDDED",
    "Base",
    "Conversion",
    "ConversionError",
    "Parity",
    "bundled_text",
    "convert",
    "load_base",
    "load_model",
    "measure_parity",
]
