"""How the commands come by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from causal_qwen.cli.console import note, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.decoder import Engine
    from causal_qwen.evaluation.predict import Predictor
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.prompting import Speaker
    from causal_qwen.serving.vllm.offline import VllmSpeaker

__all__ = [
    "MODEL_HELP",
    "Precision",
    "load",
    "load_on",
    "load_predictor",
    "load_speaker",
    "load_vllm_speaker",
]

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
MODEL_HELP = "A converted directory, or a source such as smollm2, which is converted in memory."


def load(model: str, *, device: str | None, dtype: str) -> tuple[CausalLM, CausalQwen2Processor]:
    """Model in evaluation mode, and its processor."""
    note(f"loading {model} …")
    quiet_libraries()
    from causal_qwen.conversion import load_model

    return load_model(model, device=device, dtype=dtype)


def load_on(
    engine: str, model: str, *, device: str | None, dtype: Precision
) -> tuple[CausalLM, CausalQwen2Processor, Engine | None]:
    """Model, processor and the engine of that name, None for transformers.

    Raises:
        ValueError: If the engine has no such precision or device; before anything is loaded.
    """
    integers = dtype if dtype == "int8" or dtype == "int4" else None
    if integers and engine != "native":
        raise ValueError(f"--dtype {dtype} needs --engine native")
    if engine == "native" and dtype == "float16":
        raise ValueError(
            "--dtype float16 is not the native engine's; give float32, bfloat16, int8 or int4, "
            "or --engine transformers"
        )
    if engine == "native" and device not in (None, "cpu"):
        raise ValueError(
            f"--device {device}: the native engine runs on the CPU; give --device cpu, "
            "or --engine transformers"
        )
    loaded, processor = load(model, device=device, dtype="float32" if integers else dtype)
    if integers:
        from causal_qwen.calibration import give_up_where_moved

        moved = give_up_where_moved(loaded.config, integers)
        if moved:
            note(moved)
    if engine == "transformers":
        return loaded, processor, None
    from causal_qwen.decoder import Engine

    return loaded, processor, Engine.from_model(loaded, precision=integers, tell=note)


def _vllm(model: str, *, device: str | None, dtype: Precision, share: int) -> Any:
    """vLLM's engine; it finds its own devices.

    Raises:
        ValueError: If it has no such precision, or a device is named.
    """
    if dtype in ("int8", "int4"):
        raise ValueError(f"--dtype {dtype} needs --engine native")
    if device is not None:
        raise ValueError(f"--device {device}: vLLM finds its devices itself; leave it out")
    note(f"loading {model} in vLLM …")
    from causal_qwen.serving.vllm.offline import open_engine

    return open_engine(model, dtype=dtype, share=share)


def load_predictor(
    engine: str, model: str, *, device: str | None, dtype: Precision, share: int = 1
) -> tuple[Predictor, CausalQwen2Processor, Engine | None]:
    """As `load_on`, and on vLLM too."""
    if engine != "vllm":
        return load_on(engine, model, device=device, dtype=dtype)
    from causal_qwen.serving.vllm.offline import VllmPredictor

    predictor = VllmPredictor(model, _vllm(model, device=device, dtype=dtype, share=share))
    return predictor, predictor.processor, None


def load_speaker(model: str, *, device: str | None, dtype: Precision, engine: str) -> Speaker:
    """A model that can be asked for texts, on the engine of that name."""
    loaded, processor, native = load_on(engine, model, device=device, dtype=dtype)
    from causal_qwen.prompting import Speaker

    return Speaker(loaded, processor, native)


def load_vllm_speaker(model: str, *, device: str | None, dtype: Precision, share: int) -> VllmSpeaker:
    """A model that can be asked for many texts at once; ``share`` is how many engines run here."""
    llm = _vllm(model, device=device, dtype=dtype, share=share)
    from causal_qwen.serving.vllm.offline import VllmSpeaker

    return VllmSpeaker(model, llm)
