"""Base checkpoints → CausalQwen: sources, vocabulary, transfer, and the proof that nothing changed."""

from causal_qwen.conversion.checkpoints import Checkpoint, read_checkpoint, read_config
from causal_qwen.conversion.export import Export, export
from causal_qwen.conversion.loading import check_device, load_model, load_processor
from causal_qwen.conversion.parity import Parity, Reference, compare, measure_parity, remember
from causal_qwen.conversion.sources import EMBEDDED, Base, BaseFiles, ConversionError, load_base, open_base
from causal_qwen.conversion.transfer import Conversion, bundled_text, convert

__all__ = [
    "EMBEDDED",
    "Base",
    "BaseFiles",
    "Checkpoint",
    "Conversion",
    "ConversionError",
    "Export",
    "Parity",
    "Reference",
    "bundled_text",
    "check_device",
    "compare",
    "convert",
    "export",
    "load_base",
    "load_model",
    "load_processor",
    "measure_parity",
    "open_base",
    "read_checkpoint",
    "read_config",
    "remember",
]
