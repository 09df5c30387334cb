"""How the commands come by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from causal_qwen.cli.console import note, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.prompting import Speaker

__all__ = ["MODEL_HELP", "Precision", "load", "load_speaker"]

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
MODEL_HELP = "A converted directory, or a source such as smollm2, which is converted in memory."


def load(model: str, *, device: str | None, dtype: str) -> tuple[CausalLM, CausalQwen2Processor]:
    """Model in evaluation mode, and its processor."""
    note(f"loading {model} …")
    quiet_libraries()
    from causal_qwen.conversion import load_model

    return load_model(model, device=device, dtype=dtype)


def load_speaker(model: str, *, device: str | None, dtype: Precision, engine: str) -> Speaker:
    """A model that can be asked for texts, on the engine of that name; int8 and int4 are the native one's."""
    integers = dtype if dtype == "int8" or dtype == "int4" else None
    if integers and engine != "native":
        raise ValueError(f"--dtype {dtype} needs --engine native")
    loaded, processor = load(model, device=device, dtype="float32" if integers else dtype)
    from causal_qwen.decoder import Engine
    from causal_qwen.prompting import Speaker

    if engine == "transformers":
        return Speaker(loaded, processor)
    return Speaker(loaded, processor, Engine.from_model(loaded, precision=integers, tell=note))
