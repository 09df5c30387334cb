"""Base checkpoints → CausalQwen: sources, vocabulary, calibration, and the proof that nothing changed."""

from causal_qwen.conversion.calibration import Calibration, calibrate, features
from causal_qwen.conversion.parity import Parity, measure_parity
from causal_qwen.conversion.sources import EMBEDDED, Base, ConversionError, load_base
from causal_qwen.conversion.transfer import Conversion, bundled_text, convert

__all__ = [
    "EMBEDDED",
    "Base",
    "Calibration",
    "Conversion",
    "ConversionError",
    "Parity",
    "bundled_text",
    "calibrate",
    "convert",
    "features",
    "load_base",
    "measure_parity",
]
