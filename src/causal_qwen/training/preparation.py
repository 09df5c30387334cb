"""From a recipe to what a trainer needs: the model, the rows and their parts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from causal_qwen import conversion
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import BadRows, Encoded, Encoder, Reading, Source
from causal_qwen.data.batches import pack
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows

__all__ = ["Rows", "load_model", "load_processor", "prepare_rows", "split"]

STREAM_HEAD = 2000  # rows of a stream that the value space is fitted to


@dataclass(frozen=True)
class Rows:
    """The parts of the data."""

    train: list[Encoded] | StreamedRows  # packed if the recipe says so
    sample: list[Encoded]  # rows of the training part, unpacked, to fit the start to
    validation: list[Encoded]  # rows to evaluate on
    calibration: list[Encoded]  # rows to calibrate intervals on
    bad_rows: BadRows  # what was skipped
    digest: str  # of all training rows; of a stream, of its head


def load_model(recipe: TrainingRecipe) -> tuple[CausalLM, CausalQwen2Processor]:
    """The model in the recipe's dtype, and a processor that reads numbers as values."""
    model, processor = conversion.load_model(recipe.model, dtype=recipe.dtype, seed=recipe.seed)
    return model, _reading_values(processor)


def load_processor(recipe: TrainingRecipe) -> CausalQwen2Processor:
    """The processor alone."""
    return _reading_values(conversion.load_processor(recipe.model))


def _reading_values(processor: CausalQwen2Processor) -> CausalQwen2Processor:
    template = processor.chat_template
    return CausalQwen2Processor(processor.tokenizer, numbers="value", chat_template=template)


def prepare_rows(recipe: TrainingRecipe, processor: CausalQwen2Processor, source: Source | None) -> Rows:
    """Read, encode, split and pack the rows of ``source``, or of the recipe's files.

    Raises:
        ValueError: If there is no data, or no row is left to train on.
    """
    source = recipe.data if source is None else source
    if source is None:
        raise ValueError("no data: name a file in the recipe (data: …), or hand rows to train()")
    bad_rows = BadRows(recipe.on_bad_row)
    reading = Reading(recipe.template, recipe.target, recipe.completion_only, recipe.append_eos)
    encoder = Encoder(processor, reading, recipe.max_length)

    validation = [] if recipe.validation is None else list(encoder.rows(recipe.validation, bad_rows))
    if recipe.streaming:
        head = list(itertools.islice(encoder.rows(source, BadRows(recipe.on_bad_row)), STREAM_HEAD))
        count = round(len(validation) * recipe.calibration_fraction)
        stream = StreamedRows(
            lambda: _maybe_packed(encoder.rows(source, BadRows(recipe.on_bad_row)), recipe),
            buffer=recipe.shuffle_buffer,
            seed=recipe.seed,
        )
        return Rows(stream, head, validation[count:], validation[:count], bad_rows, _digest(head))
    rows = list(encoder.rows(source, bad_rows))
    validation_part, calibration_part, training_part = split(len(rows), recipe)
    train = [rows[i] for i in training_part]
    return Rows(
        train=list(_maybe_packed(train, recipe)),
        sample=train,
        validation=validation or [rows[i] for i in validation_part],
        calibration=[rows[i] for i in calibration_part],
        bad_rows=bad_rows,
        digest=_digest(train),
    )


def split(count: int, recipe: TrainingRecipe) -> tuple[list[int], list[int], list[int]]:
    """Which of ``count`` rows are for validation, for calibration and for training, at random by seed.

    Raises:
        ValueError: If none are left to train on.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    first = round(count * recipe.validation_fraction) if recipe.validation is None else 0
    second = first + round(count * recipe.calibration_fraction)
    if count <= second:
        raise ValueError(f"{count} usable rows; none are left to train on")
    return order[:first], order[first:second], order[second:]


def _maybe_packed(rows: Iterable[Encoded], recipe: TrainingRecipe) -> Iterable[Encoded]:
    return pack(rows, recipe.max_length) if recipe.packing else rows


def _digest(rows: Sequence[Encoded]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.input_ids, row.numeric_values, row.labels)).encode())
    return digest.hexdigest()
