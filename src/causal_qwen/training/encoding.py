"""Examples → what the model sees: input_ids, numeric_values and labels, padded or packed.

Each part of an example is encoded on its own, so that a prompt has the same ids here and when the model is
asked. Labels are −100 where nothing is to be learned. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from causal_qwen.losses import IGNORE_INDEX
from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
from causal_qwen.training.data import BadRows, Example

__all__ = ["Collator", "Encoded", "Encoder", "numbers_of", "pack"]


@dataclass
class Encoded:
    """One row for the model, T tokens.

    Args:
        input_ids: T ids.
        numeric_values: T values, 0 where there is no number.
        labels: T ids, −100 where nothing is to be learned.
        lengths: Tokens of each of the sequences that are packed in it.
    """

    input_ids: list[int]
    numeric_values: list[float]
    labels: list[int]
    lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __post_init__(self) -> None:
        self.lengths = self.lengths or [len(self.input_ids)]


@dataclass(frozen=True)
class Encoder:
    """Encodes examples.

    Args:
        processor: Reads numbers as values.
        max_length: Tokens per row. A text is cut into rows of this length; a prompt with its completion that
            is longer is a bad row.
        completion_only: Whether only completions (and turns of the assistant) are learned.
        append_eos: Whether each example ends with the end-of-text token, which is learned.
        numbers: "value", or "text" to leave digits to the tokenizer.
    """

    processor: CausalQwen2Processor
    max_length: int = 512
    completion_only: bool = True
    append_eos: bool = True
    numbers: str = "value"

    def rows(self, examples: Iterable[Example], bad_rows: BadRows) -> Iterator[Encoded]:
        """The rows of the examples, in their order."""
        for example in examples:
            try:
                whole = self.encode(example)
            except ValueError as error:
                bad_rows.add(example.where, str(error))
                continue
            if len(whole) <= self.max_length:
                yield whole
            elif example.prompt or example.messages:
                bad_rows.add(example.where, f"{len(whole)} tokens; max_length is {self.max_length}")
            else:
                yield from self._windows(whole)

    def encode(self, example: Example) -> Encoded:
        """All tokens of one example.

        Raises:
            ValueError: If it has a number that is not finite, or its chat does not fit the template.
        """
        ids: list[int] = []
        values: list[float] = []
        labels: list[int] = []
        for text, learned in self._parts(example):
            part = self.processor(text, numbers=self.numbers, add_special_tokens=False)
            ids += part["input_ids"]
            values += part["numeric_values"]
            keep = learned or not self.completion_only
            labels += part["input_ids"] if keep else [IGNORE_INDEX] * len(part["input_ids"])
        eos = self.processor.tokenizer.eos_token_id
        if self.append_eos and eos is not None and example.messages is None:
            ids.append(eos)
            values.append(0.0)
            labels.append(eos)
        labels[:1] = [IGNORE_INDEX] * len(labels[:1])  # nothing comes before the first token
        return Encoded(ids, values, labels)

    def _parts(self, example: Example) -> list[tuple[str, bool]]:
        """(text, learned) parts: of a chat, what each message adds to the text of those before it."""
        if example.messages is None:
            return [(example.prompt, False), (example.completion, True)]
        messages, parts, before = list(example.messages), [], ""
        for end, message in enumerate(messages, start=1):
            learned = message["role"] == "assistant"
            if learned:
                opened = self.processor.apply_chat_template(messages[: end - 1], add_generation_prompt=True)
                parts.append((_rest(opened, before), False))
                before = opened
            text = self.processor.apply_chat_template(messages[:end])
            parts.append((_rest(text, before), learned))
            before = text
        return [part for part in parts if part[0]]

    def _windows(self, whole: Encoded) -> Iterator[Encoded]:
        for start in range(0, len(whole), self.max_length):
            part = slice(start, start + self.max_length)
            labels = [IGNORE_INDEX, *whole.labels[part][1:]]
            if len(labels) > 1:
                yield Encoded(whole.input_ids[part], whole.numeric_values[part], labels)


def _rest(text: str, before: str) -> str:
    if not text.startswith(before):
        raise ValueError(
            "the chat template rewrites earlier messages when one is added; render the text yourself"
        )
    return text[len(before) :]


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
    """Rows → a batch of tensors, padded on the right to the longest.

    Args:
        pad_token_id: Of padding, which is masked.
        packed: Whether rows hold several sequences: then there are position_ids, which restart at each
            sequence and at the padding, and no mask: transformers keeps what restarts apart.
    """

    pad_token_id: int
    packed: bool = False

    def __call__(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """input_ids, numeric_values (float64), labels, and attention_mask or position_ids, (B, T) each."""
        longest = max(len(row) for row in rows)
        shape = (len(rows), longest)
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id),
            "numeric_values": torch.zeros(shape, dtype=torch.float64),
            "labels": torch.full(shape, IGNORE_INDEX),
        }
        extra = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            for name, tensor in batch.items():
                tensor[index, : len(row)] = torch.tensor(getattr(row, name), dtype=tensor.dtype)
            if self.packed:
                pieces = [*row.lengths, longest - len(row)]
                extra[index] = torch.cat([torch.arange(length) for length in pieces])
            else:
                extra[index, : len(row)] = 1
        return batch | {"position_ids" if self.packed else "attention_mask": extra}


def numbers_of(rows: Iterable[Encoded], num_token_id: int, *, learned: bool = True) -> Tensor:
    """The values (N,) of the numbers that are to be learned, or of all, in float64."""
    return torch.tensor(
        [
            value
            for row in rows
            for token, value, label in zip(row.input_ids, row.numeric_values, row.labels, strict=True)
            if token == num_token_id and (label != IGNORE_INDEX or not learned)
        ],
        dtype=torch.float64,
    )
