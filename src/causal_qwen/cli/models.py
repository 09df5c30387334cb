"""How the commands come by a model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from causal_qwen.cli.console import note, quiet_libraries

if TYPE_CHECKING:
    from causal_qwen.causal_lm import CausalLM
    from causal_qwen.decoder.engine import Engine
    from causal_qwen.native_model import NativeModel
    from causal_qwen.number_processor import NumberProcessor
    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.prompting.answers import Speaker

__all__ = ["MODEL_HELP", "EngineName", "Precision", "load", "load_on", "load_speaker"]

logger = logging.getLogger(__name__)

Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
EngineName = Literal["auto", "transformers", "native"]
INTEGERS = ("int8", "int4")
MODEL_HELP = "A converted directory, or a source such as smollm2, which is converted in memory."


def load(model: str, *, device: str | None, dtype: str) -> tuple[CausalLM, CausalQwen2Processor]:
    """Model in evaluation mode, and its processor."""
    note(f"loading {model} …")
    quiet_libraries()
    from causal_qwen.conversion import load_model

    return load_model(model, device=device, dtype=dtype)


def load_on(
    engine: EngineName, model: str, *, device: str | None, dtype: Precision
) -> tuple[CausalLM | NativeModel, NumberProcessor, Engine | None]:
    """Model, processor and the engine that runs it, None for transformers.

    Raises:
        ValueError: If the engine has no such precision or device, or does not run this model.
    """
    _check(engine, device=device, dtype=dtype)
    if engine == "transformers" or device not in (None, "cpu") or dtype == "float16":
        return *load(model, device=device, dtype=dtype), None
    if Path(model).expanduser().is_dir():
        from causal_qwen.conversion.packing import load_native
        from causal_qwen.native_model import UnservedError

        note(f"loading {model} …")
        try:
            native, processor = load_native(Path(model).expanduser(), dtype=dtype, tell=note)
        except UnservedError as error:
            logger.info("%s", error)
        else:
            return native, processor, native.engine
    return _whole_on(engine, model, dtype=dtype)


def _whole_on(
    engine: EngineName, model: str, *, dtype: Precision
) -> tuple[CausalLM, NumberProcessor, Engine | None]:
    """The same of a model that transformers has to load: of a base that is converted in memory, or where the
    native engine does not serve.
    """
    loaded, processor = load(model, device=None, dtype="float32" if dtype in INTEGERS else dtype)
    from causal_qwen.decoder.engine import Engine
    from causal_qwen.intervals import give_up_where_moved

    precision = dtype if dtype == "int8" or dtype == "int4" else None
    try:
        native = Engine.from_model(loaded, precision=precision, tell=note)
    except ValueError as error:
        if engine == "native" or dtype in INTEGERS:
            raise
        note(f"{error}; transformers runs it")
        return loaded, processor, None
    moved = give_up_where_moved(loaded.config, dtype)
    if moved:
        note(moved)
    return loaded, processor, native


def _check(engine: EngineName, *, device: str | None, dtype: Precision) -> None:
    """Refuse what the engine has not, before anything is loaded.

    Raises:
        ValueError: Naming what would be right.
    """
    if dtype in INTEGERS and (engine == "transformers" or device not in (None, "cpu")):
        raise ValueError(f"--dtype {dtype} needs --engine native, on the CPU")
    if engine != "native":
        return
    if dtype == "float16":
        raise ValueError(
            "--dtype float16 is not the native engine's; give float32, bfloat16, int8 or int4, "
            "or --engine transformers"
        )
    if device not in (None, "cpu"):
        raise ValueError(
            f"--device {device}: the native engine runs on the CPU; give --device cpu, "
            "or --engine transformers"
        )


def load_speaker(model: str, *, device: str | None, dtype: Precision, engine: EngineName) -> Speaker:
    """A model that can be asked for texts, on the engine of that name."""
    loaded, processor, native = load_on(engine, model, device=device, dtype=dtype)
    from causal_qwen.prompting.answers import Speaker

    return Speaker(loaded, processor, native)
