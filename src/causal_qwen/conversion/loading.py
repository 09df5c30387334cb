"""load_model(): any source as a causal model with its processor, for every command and for training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from causal_qwen.calibration import give_up_where_moved
from causal_qwen.causal_lm import CausalLM
from causal_qwen.conversion.assembly import load_weights
from causal_qwen.conversion.checkpoints import (
    CAUSAL,
    Checkpoint,
    guarded,
    locate,
    read_checkpoint,
    read_config,
)
from causal_qwen.conversion.headers import ConversionError, read_json_object
from causal_qwen.conversion.sources import load_tokenizer, open_base
from causal_qwen.conversion.transfer import convert
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["check_converted", "check_device", "load_model", "load_processor"]

logger = logging.getLogger(__name__)

PROCESSOR_FILE = "processor_config.json"


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    seed: int = 0,
) -> tuple[CausalLM, CausalQwen2Processor]:
    """A causal model in evaluation mode, and its processor.

    Args:
        source: A converted directory, or what `convert` takes, which is converted in memory.
        dtype: Of the weights; "auto" keeps theirs.
        device: Where the model goes; it stays on the CPU by default.
        seed: Of the conversion.

    Raises:
        ValueError: If there is no such device.
        ConversionError: If the source is missing, damaged, incomplete or of another architecture.
    """
    check_device(device)
    name = str(source)
    if read_config(name)["model_type"] in CAUSAL:
        model, processor = _load_converted(name, dtype)
        moved = give_up_where_moved(model.config, str(model.dtype).removeprefix("torch."))
        if moved:
            logger.warning(moved)
    else:
        conversion = convert(source, dtype=dtype, seed=seed)
        model, processor = conversion.model, conversion.processor
    return model if device is None else cast(Any, model).to(device), processor


def load_processor(source: str | Path) -> CausalQwen2Processor:
    """The processor of a source, alone."""
    name = str(source)
    if read_config(name)["model_type"] in CAUSAL:
        return _converted_processor(name, locate(name, weights=False))
    base = open_base(name)
    return CausalQwen2Processor(
        choose_num_token(base.tokenizer, base.config.vocab_size).tokenizer, numbers="text"
    )


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that is not there, before anything is loaded.

    Raises:
        ValueError: Naming what there is.
    """
    if device is None:
        return
    here = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        here += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
        here.append(accelerator.type)
    if str(device) not in here:
        raise ValueError(f"device {str(device)!r} is not available; here there is {', '.join(here)}")


def check_converted(name: str) -> tuple[Checkpoint, CausalQwen2Processor]:
    """A converted directory, checked as far as it can be without its weights, and its processor.

    Raises:
        ConversionError: If it is damaged or incomplete, or its parts are of different conversions.
    """
    checkpoint = read_checkpoint(name)
    processor = _converted_processor(name, checkpoint.path)
    num_token_id = checkpoint.config.get("num_token_id")
    if processor.num_token_id != num_token_id:
        raise ConversionError(
            f"{name}: <NUM> is {processor.num_token_id} in the tokenizer and {num_token_id} in "
            "config.json; take both from the same conversion"
        )
    return checkpoint, processor


def _load_converted(name: str, dtype: torch.dtype | str) -> tuple[CausalLM, CausalQwen2Processor]:
    checkpoint, processor = check_converted(name)
    config: Any = guarded(name, lambda: AutoConfig.from_pretrained(checkpoint.path, local_files_only=True))
    model = load_weights(name, checkpoint.path, config, dtype)
    return cast(CausalLM, model.eval()), processor


def _converted_processor(name: str, directory: Path) -> CausalQwen2Processor:
    """The processor of a converted directory, each of its files checked by name."""
    read_json_object(directory / PROCESSOR_FILE, name)
    load_tokenizer(name, directory)
    processor = guarded(name, lambda: CausalQwen2Processor.from_pretrained(directory))
    return cast(CausalQwen2Processor, processor)
