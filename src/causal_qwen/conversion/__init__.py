"""Base checkpoints → CausalQwen: sources, vocabulary, transfer, and the proof that nothing changed."""

from typing import TYPE_CHECKING

from causal_qwen.lazy import lazy_names

if TYPE_CHECKING:
    from causal_qwen.conversion.checkpoints import Checkpoint, read_checkpoint, read_config
    from causal_qwen.conversion.loading import check_device, load_model, load_processor
    from causal_qwen.conversion.packing import load_native
    from causal_qwen.conversion.parity import Parity, Reference, compare, measure_parity, remember
    from causal_qwen.conversion.sources import (
        EMBEDDED,
        Base,
        BaseFiles,
        ConversionError,
        load_base,
        open_base,
    )
    from causal_qwen.conversion.transfer import Conversion, bundled_text, convert

__all__ = [
    "EMBEDDED",
    "Base",
    "BaseFiles",
    "Checkpoint",
    "Conversion",
    "ConversionError",
    "Parity",
    "Reference",
    "bundled_text",
    "check_device",
    "compare",
    "convert",
    "load_base",
    "load_model",
    "load_native",
    "load_processor",
    "measure_parity",
    "open_base",
    "read_checkpoint",
    "read_config",
    "remember",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "causal_qwen.conversion.checkpoints": (
            "Checkpoint",
            "read_checkpoint",
            "read_config",
        ),
        "causal_qwen.conversion.loading": (
            "check_device",
            "load_model",
            "load_processor",
        ),
        "causal_qwen.conversion.packing": ("load_native",),
        "causal_qwen.conversion.parity": (
            "Parity",
            "Reference",
            "compare",
            "measure_parity",
            "remember",
        ),
        "causal_qwen.conversion.sources": (
            "EMBEDDED",
            "Base",
            "BaseFiles",
            "ConversionError",
            "load_base",
            "open_base",
        ),
        "causal_qwen.conversion.transfer": (
            "Conversion",
            "bundled_text",
            "convert",
        ),
    },
)
