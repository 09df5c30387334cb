"""Rows → batches of tensors: padded or packed, rows of similar length together.

From a file, a table or an example to a batch there is this one way. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from causal_qwen.data.encoding import Encoded, Encoder, encode_prompt
from causal_qwen.data.reading import Example, Reading
from causal_qwen.data.rows import BadRows, Source
from causal_qwen.labels import IGNORE_INDEX
from causal_qwen.number_processor import NumberProcessor

__all__ = [
    "Collator",
    "Prompt",
    "batches_of",
    "labelled_batches",
    "pack",
    "prompt_batch",
    "prompt_row",
    "windows_by_length",
]

# Batches whose rows are sorted by length together: less padding with more, more to repeat after a stop.
BATCHES_SORTED = 8
Item = TypeVar("Item")
# A text, or the messages of a chat that awaits its answer.
Prompt = str | Sequence[Mapping[str, Any]]


def prompt_batch(
    processor: NumberProcessor, prompts: Sequence[Prompt], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """What generate() takes of some prompts: input_ids, attention_mask and numeric_values, (B, T) each.

    Args:
        processor: Reads numbers.
        prompts: Texts and chats; the shorter ones are padded on the left.
        device: Where the model is.

    Raises:
        ValueError: If a prompt has no token.
    """
    rows = []
    for index, prompt in enumerate(prompts):
        try:
            rows.append(prompt_row(processor, prompt))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    batch = replace(Collator.of(processor), padding_side="left")(rows)
    names = ("input_ids", "attention_mask", "numeric_values")
    return {name: batch[name].to(device) for name in names}


def prompt_row(processor: NumberProcessor, prompt: Prompt) -> Encoded:
    """Ids and values of one prompt; special tokens in messages stay text.

    Raises:
        ValueError: If it has no token, or a number that is not finite.
    """
    if isinstance(prompt, str):
        example = Example(prompt, "", "the prompt")
    else:
        example = Example("", "", "the prompt", tuple(prompt))
    return encode_prompt(processor, example)[1]


def labelled_batches(
    processor: NumberProcessor,
    source: Source,
    *,
    reading: Reading | None = None,
    max_length: int = 512,
    batch_size: int = 16,
    bad_rows: BadRows | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Padded batches with labels, as `evaluate` takes them; a few of them are in memory.

    Args:
        processor: The model's.
        source: Files or rows, as for `read_rows`.
        reading: How rows become texts; `Reading.of` a trained model knows. Rows have texts of their own by
            default.
        max_length: Tokens per row; a longer text is cut, a longer prompt with its completion is a bad row.
        batch_size: Rows per batch.
        bad_rows: Counts what is skipped; the first bad row stops by default.
    """
    encoder = Encoder(processor, reading or Reading(), max_length)
    rows = encoder.rows(source, bad_rows or BadRows())
    collate = Collator.of(processor)
    for window, batches in windows_by_length(rows, batch_size, length=len):
        for batch in batches:
            yield collate([window[index] for index in batch])


def batches_of(rows: Sequence[Encoded], collator: Collator, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Padded batches in the order of the rows, for evaluation and calibration."""
    for start in range(0, len(rows), batch_size):
        yield collator(rows[start : start + batch_size])


def windows_by_length(
    items: Iterable[Item], batch_size: int, *, length: Callable[[Item], int]
) -> Iterator[tuple[list[Item], list[list[int]]]]:
    """Windows of eight batches, read one at a time, so that items of similar length share a batch.

    Yields:
        The items of a window in their order, and which of them make each batch.

    Raises:
        ValueError: If the batch size is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least 1 row is read at a time")
    iterator = iter(items)
    while window := list(islice(iterator, BATCHES_SORTED * batch_size)):
        lengths = [length(item) for item in window]
        order = sorted(range(len(window)), key=lengths.__getitem__)
        yield window, [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def pack(rows: Iterable[Encoded], max_length: int) -> Iterator[Encoded]:
    """Rows of up to ``max_length`` tokens, each of several whole sequences that do not see one another.

    The collator restarts positions at each sequence, from which transformers derives attention.
    """
    open_row: list[Encoded] = []
    size = 0
    for row in rows:
        if open_row and size + len(row) > max_length:
            yield _joined(open_row)
            open_row, size = [], 0
        open_row.append(row)
        size += len(row)
    if open_row:
        yield _joined(open_row)


def _joined(rows: Sequence[Encoded]) -> Encoded:
    return Encoded(
        [token for row in rows for token in row.input_ids],
        [value for row in rows for value in row.numeric_values],
        [label for row in rows for label in row.labels],
        [length for row in rows for length in row.lengths],
    )


@dataclass(frozen=True)
class Collator:
    """Rows → a batch of tensors, padded to the longest.

    Args:
        pad_token_id: Of padding, which is masked.
        packed: Whether rows hold several sequences: then there are position_ids, which restart at each
            sequence and at the padding, and no mask: transformers keeps what restarts apart.
        padding_side: "right", or "left" for rows that are to be continued.
    """

    pad_token_id: int
    packed: bool = False
    padding_side: Literal["left", "right"] = "right"

    @classmethod
    def of(cls, processor: NumberProcessor) -> Collator:
        """With the tokenizer's padding, or its end of text; padding is masked, so that any id would do."""
        tokenizer = processor.tokenizer
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return cls(0 if padding is None else padding)

    def __call__(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """input_ids, numeric_values (float64), labels, and attention_mask or position_ids, (B, T) each.

        Raises:
            ValueError: If a value is NaN or infinite; row and position are named.
        """
        longest = max(len(row) for row in rows)
        shape = (len(rows), longest)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "numeric_values": torch.zeros(shape, dtype=torch.float64),
            "labels": torch.full(shape, IGNORE_INDEX),
        }
        extra = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            first = longest - len(row) if self.padding_side == "left" else 0
            place = slice(first, first + len(row))
            for name, tensor in batch.items():
                tensor[index, place] = torch.tensor(getattr(row, name), dtype=tensor.dtype)
            if self.packed:
                pieces = [*row.lengths, longest - len(row)]
                extra[index] = torch.cat([torch.arange(length) for length in pieces])
            else:
                extra[index, place] = 1
        wrong = (~batch["numeric_values"].isfinite()).nonzero().tolist()
        if wrong:
            (index, position), *_ = wrong
            value = batch["numeric_values"][index, position].item()
            raise ValueError(
                f"the value at row {index}, position {position} is {value}; only finite numbers are learned"
            )
        return batch | {"position_ids" if self.packed else "attention_mask": extra}
