"""How the commands come by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from causal_qwen.cli.console import note, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["MODEL_HELP", "load"]

MODEL_HELP = "A converted directory, or a source such as smollm2, which is converted in memory."


def load(model: str, *, device: str | None, dtype: str) -> tuple[CausalLM, CausalQwen2Processor]:
    """Model in evaluation mode, and its processor."""
    note(f"loading {model} …")
    quiet_libraries()
    from causal_qwen.conversion import load_model

    return load_model(model, device=device, dtype=dtype)
