"""Predictions for rows: the number that would come next after each prompt, with its interval.

Rows are read one at a time and predictions leave in their order; a few batches of them are in memory. How a
row becomes a prompt is `causal_qwen.data`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from causal_qwen.context import check_context
from causal_qwen.data import BadRows, Collator, Encoded, Reading, Source, encode_prompt, windows_by_length
from causal_qwen.data.rows import Row
from causal_qwen.decoder.engine import Engine
from causal_qwen.number_processor import NumberProcessor

if TYPE_CHECKING:
    from causal_qwen.outputs import NumberPrediction

__all__ = ["COLUMNS", "Prediction", "Predictor", "column_of", "predict"]

# Of a table of predictions, before the columns of its rows.
COLUMNS = {
    "row": int,
    "source": str,
    "prompt": str,
    "median": float,
    "lower": float,
    "upper": float,
    "prob_num": float,
    "extrapolates": bool,
}
INPUTS = ("input_ids", "attention_mask", "numeric_values")


class Predictor(Protocol):
    """What predictions need of a model: `CausalLM` is one."""

    config: Any

    @property
    def device(self) -> Any:
        """Where it is."""
        ...

    def predict_number(
        self, batch: Mapping[str, Any], level: float, *, raw: bool, engine: Engine | None
    ) -> NumberPrediction:
        """The number that would come next in each row."""
        ...


@dataclass(frozen=True)
class Prediction:
    """The number after one prompt.

    Args:
        source: File and line of the row, or its index.
        prompt: Text before the number.
        median: Point prediction.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        prob_num: P_<NUM>, that the next token is a number at all.
        extrapolates: Whether it lies beyond what training has seen; None where nobody knows.
        fields: The row as it was read.
    """

    source: str
    prompt: str
    median: float
    lower: float
    upper: float
    prob_num: float
    extrapolates: bool | None = None
    fields: Row = field(default_factory=dict)

    def record(self, index: int) -> dict[str, Any]:
        """A row of a table: `COLUMNS`, and the fields of the row under their names.

        A field that is called like one of our columns gets "input_" before its name.
        """
        record: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS if name != "row"}
        record = {"row": index} | record
        return record | {column_of(name): value for name, value in self.fields.items()}


def column_of(name: str) -> str:
    """The column of a table of predictions in which a field of a row stands."""
    return f"input_{name}" if name in COLUMNS else name


class _Question(NamedTuple):
    """A prompt that is to be continued by a number."""

    source: str
    prompt: str
    row: Encoded
    fields: Row


def predict(
    model: Predictor,
    processor: NumberProcessor,
    source: Source,
    *,
    reading: Reading | None = None,
    level: float = 0.9,
    raw: bool = False,
    batch_size: int = 32,
    bad_rows: BadRows | None = None,
    start: int = 0,
    step: tuple[int, int] = (0, 1),
    engine: Engine | None = None,
) -> Iterator[Prediction]:
    """One `Prediction` per usable row, in their order.

    Args:
        model: In evaluation mode.
        processor: The model's.
        source: Files or rows, as for `read_rows`; {"prompt": "A car of 1200 kg drives "} is a row.
        reading: How rows become prompts; `Reading.of` a trained model knows. Rows have texts of their own by
            default.
        level: Probability of the interval, in (0, 1).
        raw: Whether the interval is the Cauchy law's own, as in `predict_number`.
        batch_size: Prompts per forward pass.
        bad_rows: Counts what is skipped; the first bad row stops by default.
        start: Usable rows to pass over, which an earlier run has predicted.
        step: (i, n): of the usable rows only every n-th, from the i-th on; ``start`` counts these.
        engine: Made from the model; runs its backbone.

    Raises:
        BadRow: If a prompt is missing, empty or longer than the model reads, unless such rows are skipped.
    """
    questions = _questions(model, processor, source, reading or Reading(), bad_rows or BadRows())
    collate = Collator.of(processor)
    first, every = step
    rest = itertools.islice(questions, first + every * start, None, every)
    for window, batches in windows_by_length(rest, batch_size, length=lambda question: len(question.row)):
        predictions: dict[int, Prediction] = {}
        for batch in batches:
            rows = collate([window[index].row for index in batch])
            inputs = {name: rows[name].to(model.device) for name in INPUTS}  # (B, T) each
            numbers = model.predict_number(inputs, level, raw=raw, engine=engine)
            columns = (numbers.median, numbers.lower, numbers.upper, numbers.prob_num)  # (B,) each
            flags = [None] * len(batch) if numbers.extrapolates is None else numbers.extrapolates.tolist()
            entries = zip(*(column.tolist() for column in columns), flags, strict=True)
            for index, entry in zip(batch, entries, strict=True):
                question, (median, lower, upper, prob_num, flag) = window[index], entry
                predictions[index] = Prediction(
                    question.source, question.prompt, median, lower, upper, prob_num, flag, question.fields
                )
        yield from (predictions[index] for index in range(len(window)))


def _questions(
    model: Predictor,
    processor: NumberProcessor,
    source: Source,
    reading: Reading,
    bad_rows: BadRows,
) -> Iterator[_Question]:
    longest = model.config.max_position_embeddings
    for example in reading.prompts(source, bad_rows):
        try:
            prompt, row = encode_prompt(processor, example)
            check_context(longest, len(row))
        except ValueError as error:
            bad_rows.add(example.where, str(error))
            continue
        yield _Question(example.where, prompt, row, example.row)
