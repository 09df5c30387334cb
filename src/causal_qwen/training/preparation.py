"""From a recipe to what a trainer needs: the model, the rows and their parts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from causal_qwen import conversion
from causal_qwen.causal_lm import CausalLM
from causal_qwen.data import BadRows, Encoded, Encoder, Files, Reading, Source
from causal_qwen.data.batches import pack
from causal_qwen.data.encoding import numbers_of
from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.recipe import TrainingRecipe
from causal_qwen.training.sampling import StreamedRows

__all__ = ["Rows", "check_files", "count_examples", "load_model", "load_processor", "prepare_rows", "split"]

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
    num_token_id: int  # <NUM>
    eos_token_id: int | None  # what ends a text

    @property
    def words(self) -> bool:
        """Whether anything but numbers and ends is learned."""
        known = {self.num_token_id, self.eos_token_id, IGNORE_INDEX}
        return any(not known.issuperset(row.labels) for row in self.sample)

    @property
    def numbers(self) -> dict[str, int]:
        """How many numbers are learned, evaluated and calibrated on; of a stream, learned in its head."""
        parts = {"train": self.sample, "validation": self.validation, "calibration": self.calibration}
        return {name: len(numbers_of(rows, self.num_token_id)) for name, rows in parts.items()}

    def __str__(self) -> str:
        """What is learned from, in a line."""
        rows = {"train": self.sample, "validation": self.validation, "calibration": self.calibration}
        phrases = [f"{len(rows[name])} rows with {count} numbers" for name, count in self.numbers.items()]
        head = "the first " if isinstance(self.train, StreamedRows) else ""
        skipped = f"; {self.bad_rows}" if self.bad_rows.count else ""
        learned, evaluated, calibrated = phrases
        rest = f"evaluating on {evaluated}, calibrating on {calibrated}{skipped}"
        return f"learning from {head}{learned}, {rest}"


def load_model(recipe: TrainingRecipe) -> tuple[CausalLM, CausalQwen2Processor]:
    """The model in the recipe's dtype, and a processor that reads numbers as the recipe says."""
    model, processor = conversion.load_model(recipe.model, dtype=recipe.dtype, seed=recipe.seed)
    return model, _reading_numbers(processor, recipe)


def load_processor(recipe: TrainingRecipe) -> CausalQwen2Processor:
    """The processor alone."""
    return _reading_numbers(conversion.load_processor(recipe.model), recipe)


def _reading_numbers(processor: CausalQwen2Processor, recipe: TrainingRecipe) -> CausalQwen2Processor:
    """By default a model that has learned to read numbers reads them on in that way; "text" is a base's."""
    own = "written" if processor.numbers == "text" else processor.numbers
    template = processor.chat_template
    return CausalQwen2Processor(processor.tokenizer, numbers=recipe.numbers or own, chat_template=template)


def prepare_rows(recipe: TrainingRecipe, processor: CausalQwen2Processor, source: Source | None) -> Rows:
    """Read, encode, split and pack the rows of ``source``, or of the recipe's files.

    Raises:
        ValueError: If there is no data, or no row is left to train on.
    """
    if source is None and recipe.data is not None:
        source = _files(recipe, recipe.data)
    if source is None:
        raise ValueError("no data: name a file in the recipe (data: …), or hand rows to train()")
    bad_rows = BadRows(recipe.on_bad_row)
    encoder = Encoder(processor, _reading(recipe), recipe.max_length)

    held_out = None if recipe.validation is None else _files(recipe, recipe.validation)
    validation = [] if held_out is None else list(encoder.rows(held_out, bad_rows))
    if recipe.streaming:
        head = list(itertools.islice(encoder.rows(source, bad_rows), STREAM_HEAD))
        count = round(len(validation) * recipe.share_to_calibrate)
        stream = StreamedRows(
            lambda: _maybe_packed(encoder.rows(source, BadRows(recipe.on_bad_row)), recipe),
            buffer=recipe.shuffle_buffer,
            seed=recipe.seed,
        )
        return Rows(
            train=stream,
            sample=head,
            validation=validation[count:],
            calibration=validation[:count],
            bad_rows=bad_rows,
            digest=_digest(head),
            num_token_id=processor.num_token_id,
            eos_token_id=processor.tokenizer.eos_token_id,
        )
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
        num_token_id=processor.num_token_id,
        eos_token_id=processor.tokenizer.eos_token_id,
    )


def check_files(recipe: TrainingRecipe) -> None:
    """Read the first usable row of each file, which takes no model.

    Raises:
        ValueError: If a file is missing or unreadable, or has no usable row.
    """
    for paths in (recipe.data, recipe.validation):
        if paths is not None:
            examples = _reading(recipe).examples(
                _files(recipe, paths), BadRows(recipe.on_bad_row, silent=True)
            )
            if next(examples, None) is None:
                raise ValueError(f"{paths if isinstance(paths, str) else ', '.join(paths)}: no usable row")


def count_examples(recipe: TrainingRecipe) -> int | None:
    """Rows that are left to train on, before any text is cut; None without data, or of a stream."""
    if recipe.data is None or recipe.streaming:
        return None
    bad_rows = BadRows(recipe.on_bad_row, silent=True)
    count = sum(1 for _ in _reading(recipe).examples(_files(recipe, recipe.data), bad_rows))
    return len(split(count, recipe)[2])


def _reading(recipe: TrainingRecipe) -> Reading:
    return Reading(
        recipe.template,
        recipe.target,
        recipe.completion_only,
        recipe.append_eos,
        template_seed=recipe.seed,
    )


def _files(recipe: TrainingRecipe, paths: str | list[str]) -> Files:
    return Files(paths, delimiter=recipe.delimiter, encoding=recipe.encoding)


def split(count: int, recipe: TrainingRecipe) -> tuple[list[int], list[int], list[int]]:
    """Which of ``count`` rows are for validation, for calibration and for training, at random by seed.

    Raises:
        ValueError: If none are left to train on.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    first = round(count * recipe.validation_fraction) if recipe.validation is None else 0
    second = first + round(count * recipe.share_to_calibrate)
    if count <= second:
        rows = "1 usable row" if count == 1 else f"{count} usable rows"
        raise ValueError(f"{rows}; none are left to train on")
    return order[:first], order[first:second], order[second:]


def _maybe_packed(rows: Iterable[Encoded], recipe: TrainingRecipe) -> Iterable[Encoded]:
    return pack(rows, recipe.max_length) if recipe.packing else rows


def _digest(rows: Sequence[Encoded]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.input_ids, row.numeric_values, row.labels)).encode())
    return digest.hexdigest()
