"""How the commands come by a model: a converted directory, or a source that is converted in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from causal_qwen.cli.console import note, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["MODEL_HELP", "load"]

MODEL_HELP = "A converted directory, or a source such as smollm2, which is converted in memory."


def load(
    model: str, *, device: str | None, dtype: str
) -> tuple[CausalQwen2ForCausalLM, CausalQwen2Processor]:
    """Model in evaluation mode, and its processor."""
    note(f"loading {model} …")
    quiet_libraries()
    from causal_qwen.conversion import convert
    from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

    loaded: Any
    if (Path(model) / "processor_config.json").is_file():
        loaded = CausalQwen2ForCausalLM.from_pretrained(model, dtype=dtype).eval()
        processor = CausalQwen2Processor.from_pretrained(model)
    else:
        conversion = convert(model, dtype=dtype)
        loaded, processor = conversion.model, conversion.processor
    return (loaded.to(device) if device else loaded), processor
