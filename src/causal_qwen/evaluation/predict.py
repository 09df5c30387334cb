"""Predictions for rows: the number that would come next after each prompt, with its interval.

Prompts arrive one at a time and leave in their order; a few batches of them are in memory. This module does
not know files of any kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from causal_qwen.modeling_causal_qwen2 import CausalQwen2ForCausalLM
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor

__all__ = ["Prediction", "predict"]

# Batches whose prompts are sorted by length together: less padding with more, more to repeat after a stop.
BATCHES_SORTED = 8


@dataclass(frozen=True)
class Prediction:
    """The number after one prompt.

    Args:
        median: Point prediction.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        prob_num: P_<NUM>, that the next token is a number at all.
    """

    median: float
    lower: float
    upper: float
    prob_num: float


def predict(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    prompts: Iterable[str],
    *,
    level: float = 0.9,
    raw: bool = False,
    batch_size: int = 32,
) -> Iterator[Prediction]:
    """One `Prediction` per prompt, in their order.

    Args:
        model: In evaluation mode.
        processor: The model's.
        prompts: Texts that end where a number is expected; any number of them.
        level: Probability of the interval, in (0, 1).
        raw: Whether the interval is the Cauchy law's own, as in `predict_number`.
        batch_size: Prompts per forward pass.

    Raises:
        ValueError: If a prompt is empty or longer than the model reads; it is named by its index.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least 1 prompt is read at a time")
    first = 0
    for window in _windows(prompts, BATCHES_SORTED * batch_size):
        yield from _predict_window(model, processor, window, first, level, raw, batch_size)
        first += len(window)


def _windows(prompts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(prompts)
    while window := list(itertools.islice(iterator, size)):
        yield window


def _predict_window(
    model: CausalQwen2ForCausalLM,
    processor: CausalQwen2Processor,
    prompts: Sequence[str],
    first: int,
    level: float,
    raw: bool,
    batch_size: int,
) -> list[Prediction]:
    """Prompts of similar length share a batch; ``first`` is the index of the first prompt."""
    # As in training, where a prompt brings no special tokens that it does not spell.
    encoded = processor(list(prompts), add_special_tokens=False)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    longest = model.config.max_position_embeddings
    for index, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"prompt {first + index} is empty; a number needs some text before it")
        if length > longest:
            raise ValueError(f"prompt {first + index} has {length} tokens; the model reads {longest}")
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    found: dict[int, Prediction] = {}
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        read = model.predict_number(_padded(encoded, rows, model.device), level, raw=raw)
        columns = (read.median, read.lower, read.upper, read.prob_num)
        for row, entries in zip(
            rows, zip(*(column.tolist() for column in columns), strict=True), strict=True
        ):
            found[row] = Prediction(*entries)
    return [found[row] for row in range(len(prompts))]


def _padded(
    encoded: dict[str, list[list[float]]], rows: Sequence[int], device: torch.device
) -> dict[str, torch.Tensor]:
    """Some rows as tensors, padded on the right; padding is masked, so that its id does not matter."""
    longest = max(len(encoded["input_ids"][row]) for row in rows)
    dtypes = {"input_ids": torch.long, "attention_mask": torch.long, "numeric_values": torch.float64}
    batch = {name: torch.zeros(len(rows), longest, dtype=dtype) for name, dtype in dtypes.items()}
    for place, row in enumerate(rows):
        for name, tensor in batch.items():
            entries = encoded[name][row]
            tensor[place, : len(entries)] = torch.tensor(entries, dtype=tensor.dtype)
    return {name: tensor.to(device) for name, tensor in batch.items()}
