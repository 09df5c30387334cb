"""Texts → what the model sees: input_ids, numeric_values and labels.

Each part of an example is encoded on its own, so that a prompt has the same ids in training and when it is
to be answered. Labels are −100 where nothing is to be learned. This module knows no model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from causal_qwen.data.chats import Chat
from causal_qwen.data.reading import ASSISTANT, Example, Reading
from causal_qwen.data.rows import BadRows, Source
from causal_qwen.labels import IGNORE_INDEX
from causal_qwen.number_processor import NumberProcessor
from causal_qwen.numbers import Number, scan

__all__ = ["Encoded", "Encoder", "encode_prompt", "encode_text", "numbers_in", "numbers_of"]


def encode_text(
    processor: NumberProcessor,
    text: str,
    *,
    begins: bool,
    numbers: str | None = None,
    known: Sequence[Number] = (),
) -> tuple[list[int], list[float]]:
    """Ids and values of a text, with the project's one policy for the beginning-of-text token.

    A text that begins a sequence gets the special tokens that the base's own tokenizer puts before a text
    (Llama's adds BOS; Qwen's and SmolLM2's add none) and none behind it: rows begin in training as prompts do
    at generation. What continues a sequence gets none, and a chat carries those of its template.

    Args:
        processor: Reads numbers.
        text: All of a text, or a part of it.
        begins: Whether it begins a sequence, and is no chat.
        numbers: "value" or "text"; as the processor reads prompts by default.
        known: Numbers of the text that are fields of a row, and numbers whatever their digits look like.

    Raises:
        ValueError: If the text has half a character, which JSON can write and UTF-8 cannot.
    """
    numbers = numbers or processor.read_as
    spans = [numbers_in(text, known)] if known and numbers == "value" else None
    encoding = processor(text, numbers=numbers, spans=spans, add_special_tokens=False)
    beginning = _beginning(processor) if begins else []
    return [*beginning, *encoding["input_ids"]], [*(0.0 for _ in beginning), *encoding["numeric_values"]]


def numbers_in(text: str, known: Sequence[Number]) -> list[Number]:
    """The known numbers of a text, and those that `scan` finds around them.

    A known number stands as "1" while the rest is scanned, so that how the rest is read does not depend on
    the digits of a field.

    Args:
        text: Any string.
        known: In their order, without overlap.
    """
    pieces: list[str] = []
    places: list[int] = []  # of each "1" in the text that is scanned
    end = length = 0
    for number in known:
        pieces += (text[end : number.start], "1")
        length += number.start - end + 1
        places.append(length - 1)
        end = number.end
    pieces.append(text[end:])
    numbers: list[Number] = []
    before, shift = 0, 0  # known numbers that lie before, and by how many characters they are longer than "1"
    for number in scan("".join(pieces)):
        while before < len(places) and places[before] < number.start:
            numbers.append(known[before])
            shift += known[before].end - known[before].start - 1
            before += 1
        if before == len(places) or places[before] >= number.end:
            start, stop = number.start + shift, number.end + shift
            numbers.append(Number(start, stop, number.text, number.value))
    return [*numbers, *known[before:]]


def _beginning(processor: NumberProcessor) -> list[int]:
    """The special tokens that the tokenizer puts before any text."""
    encoding = processor.tokenizer("a", return_special_tokens_mask=True)
    beginning: list[int] = encoding["input_ids"][: encoding["special_tokens_mask"].index(0)]
    return beginning


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
    """Encodes what is to be learned.

    Args:
        processor: Reads the numbers of prompts in its way; those that are learned are values.
        reading: How rows become texts, and what of them is learned.
        max_length: Tokens per row. A text is cut into rows of this length; a prompt with its completion that
            is longer is a bad row.
    """

    processor: NumberProcessor
    reading: Reading = field(default_factory=Reading)
    max_length: int = 512

    def rows(self, source: Source, bad_rows: BadRows) -> Iterator[Encoded]:
        """The rows of files or mappings, in their order; what cannot be used goes to ``bad_rows``."""
        for example in self.reading.examples(source, bad_rows):
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
        for text, known, learned in self._parts(example):
            begins = example.messages is None and not ids
            numbers = "value" if learned else self.processor.read_as
            part_ids, part_values = encode_text(
                self.processor, text, begins=begins, numbers=numbers, known=known
            )
            ids += part_ids
            values += part_values
            keep = learned or not self.reading.completion_only
            labels += part_ids if keep else [IGNORE_INDEX] * len(part_ids)
        eos = self.processor.tokenizer.eos_token_id
        if self.reading.append_eos and eos is not None and example.messages is None:
            ids.append(eos)
            values.append(0.0)
            labels.append(eos)
        labels[:1] = [IGNORE_INDEX] * len(labels[:1])  # nothing comes before the first token
        return Encoded(ids, values, labels)

    def _parts(self, example: Example) -> list[tuple[str, Sequence[Number], bool]]:
        """(text, known numbers, learned): of a chat, what each message adds to the text of those before."""
        if example.messages is None:
            if self.processor.numbers == "written":
                example = _joined(example)
            return [
                (example.prompt, example.prompt_numbers, False),
                (example.completion, example.completion_numbers, True),
            ]
        chat = Chat(self.processor, example.messages)
        parts, _ = _turns(chat, example.messages)
        return [(piece, (), learned) for part, learned in parts for piece in chat.parts(part) if piece]

    def _windows(self, whole: Encoded) -> Iterator[Encoded]:
        for start in range(0, len(whole), self.max_length):
            part = slice(start, start + self.max_length)
            labels = [IGNORE_INDEX, *whole.labels[part][1:]]
            if len(labels) > 1:
                yield Encoded(whole.input_ids[part], whole.numeric_values[part], labels)


def _joined(example: Example) -> Example:
    """The example with its prompt as "written" reads it, without white space at the end.

    The white space goes over to a completion of words, whose tokens carry their space in front. A number
    follows the prompt directly: its law is read off the last token that is seen, and must not depend on a
    space that somebody types or forgets.
    """
    prompt = example.prompt.rstrip()
    if not prompt:
        return example
    completion = example.prompt[len(prompt) :] + example.completion
    moved = len(completion) - len(example.completion)
    known = example.completion_numbers
    start = len(completion) - len(completion.lstrip())
    first = next(iter(numbers_in(example.completion, known)), None)
    if first is not None and first.start + moved == start:
        completion, moved = completion[start:], moved - start
    return replace(
        example,
        prompt=prompt,
        completion=completion,
        prompt_numbers=(),  # digits, like the rest of the prompt
        completion_numbers=tuple(
            replace(number, start=number.start + moved, end=number.end + moved) for number in known
        ),
    )


def _turns(chat: Chat, messages: Sequence[Mapping[str, str]]) -> tuple[list[tuple[str, bool]], str]:
    """What each message adds to the text of those before, and whether the assistant has written it; and the
    whole text.

    Raises:
        ValueError: If the template rewrites a message when another follows.
    """
    parts: list[tuple[str, bool]] = []
    before = ""
    for end, message in enumerate(messages, start=1):
        written = message["role"] == ASSISTANT
        if written:
            opened = chat.text(end - 1, opened=True)
            parts.append((_rest(opened, before), False))
            before = opened
        text = chat.text(end)
        parts.append((_rest(text, before), written))
        before = text
    return parts, before


def _rest(text: str, before: str) -> str:
    if not text.startswith(before):
        raise ValueError(
            "the chat template rewrites earlier messages when one is added; render the text yourself"
        )
    return text[len(before) :]


def encode_prompt(processor: NumberProcessor, example: Example) -> tuple[str, Encoded]:
    """The text that is to be continued, and its row, in which nothing is learned.

    Args:
        processor: Reads numbers as it does at generation.
        example: Of `Reading.prompts`; a chat is opened for the assistant.

    Raises:
        ValueError: If it is empty, has a number that is not finite, or is a chat that the template refuses.
    """
    known: Sequence[Number] = ()
    if example.messages is None:
        prompt = example.prompt.rstrip() if processor.numbers == "written" else example.prompt
        pieces, known = [(prompt, processor.read_as)], example.prompt_numbers
    else:
        pieces = _opened(processor, example.messages)
    ids: list[int] = []
    values: list[float] = []
    for piece, numbers in pieces:
        begins = example.messages is None
        piece_ids, piece_values = encode_text(processor, piece, begins=begins, numbers=numbers, known=known)
        ids += piece_ids
        values += piece_values
    if not ids:
        raise ValueError("the prompt is empty; give at least one token to continue")
    return "".join(piece for piece, _ in pieces), Encoded(ids, values, [IGNORE_INDEX] * len(ids))


def _opened(processor: NumberProcessor, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """(text, how its numbers are read) of a chat that awaits its answer; joined, the template's text.

    What the assistant said before is read as it was written, where the template lets it be told apart.
    """
    chat = Chat(processor, messages)
    text = chat.text(opened=True)
    parts = [(text, False)]
    if processor.read_as != processor.written_as:
        with contextlib.suppress(ValueError):  # the template rewrites what was said: all of it is read
            turns, before = _turns(chat, messages)
            parts = [*turns, (_rest(text, before), False)]
    return [
        (piece, processor.written_as if written else processor.read_as)
        for part, written in parts
        for piece in chat.parts(part)
    ]


def numbers_of(rows: Iterable[Encoded], num_token_id: int) -> Tensor:
    """The values (N,) of the numbers that are to be learned, in float64."""
    return torch.tensor(
        [
            value
            for row in rows
            for token, value, label in zip(row.input_ids, row.numeric_values, row.labels, strict=True)
            if token == num_token_id and label != IGNORE_INDEX
        ],
        dtype=torch.float64,
    )
