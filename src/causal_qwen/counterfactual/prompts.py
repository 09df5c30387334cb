"""What an individual is asked: a text, or a chat that awaits its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["Prompt", "encode_prompt"]

Prompt = str | Sequence[Mapping[str, Any]]


def encode_prompt(processor: CausalQwen2Processor, prompt: Prompt, device: torch.device) -> dict[str, Tensor]:
    """input_ids, attention_mask and numeric_values, (1, T) each, of a text, or a chat awaiting its answer.

    Raises:
        ValueError: If the prompt has no token.
    """
    if isinstance(prompt, str):
        batch = processor(prompt, return_tensors="pt")
    else:
        batch = processor.apply_chat_template(
            list(prompt), tokenize=True, add_generation_prompt=True, return_tensors="pt"
        )
    if batch["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty; give at least one token to continue")
    return {name: tensor.to(device) for name, tensor in batch.items()}
