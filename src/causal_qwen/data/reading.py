"""Rows → what they say: examples to learn or to measure, and prompts to answer.

A row has "text", or "prompt" and "completion", or "messages"; or any fields, with a template that makes a
sentence of them. A trained model's directory says in recipe.yaml how its rows were read. This module knows
neither tokens nor models.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from causal_qwen.data.fields import number_in, shortest
from causal_qwen.data.rows import BadRows, Row, Source, read_rows
from causal_qwen.data.settings import read_settings
from causal_qwen.data.templates import Passage, Template
from causal_qwen.numbers import Number

__all__ = ["Example", "Reading", "read_messages", "read_prompt"]

RECIPE_FILE = "recipe.yaml"
ASSISTANT = "assistant"
REMEDY = "; give a template for a table"


@dataclass(frozen=True)
class Example:
    """What one row says.

    Args:
        prompt: Text that comes before; empty where all is to be learned.
        completion: Text that is to be learned; empty where it is what is wanted.
        where: File and line.
        messages: A chat instead of the two texts.
        prompt_numbers: Numbers in the prompt that are fields of a row.
        completion_numbers: Those in the completion.
        row: As it was read.
    """

    prompt: str
    completion: str
    where: str
    messages: tuple[Mapping[str, str], ...] | None = None
    prompt_numbers: tuple[Number, ...] = ()
    completion_numbers: tuple[Number, ...] = ()
    row: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """How rows become texts.

    Args:
        template: Sentence of a table's row, or several that say the same; None for rows with texts of their
            own. Prompts are made by the first, and so are examples unless there is a ``template_seed``.
        target: Field that is to be predicted; every template has it.
        completion_only: Whether only completions count.
        append_eos: Whether the end of a text counts.
        template_seed: Draws the template of each example, by its place among the rows: a row has the same
            sentence whenever it is read.

    Raises:
        ValueError: If there is a target without a template, or a value is of another type.
    """

    template: str | list[str] | tuple[str, ...] | None = None
    target: str | None = None
    completion_only: bool = True
    append_eos: bool = True
    template_seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.template, list):
            object.__setattr__(self, "template", tuple(self.template))  # frozen, and equal however it came
        if not isinstance(self.template, str | tuple | None) or (
            self.template is not None and not all(isinstance(one, str) for one in self.templates or [None])
        ):
            raise ValueError(f"template is {self.template!r:.40}; it must be a str, or a list of them")
        for name, kind in (("target", str), ("completion_only", bool), ("append_eos", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and kind is str):
                raise ValueError(f"{name} is {value!r:.40}; it must be a {kind.__name__}")
        if self.target is not None and self.template is None:
            raise ValueError(f"target is {self.target!r}, a field of a template; there is no template")

    @property
    def templates(self) -> tuple[str, ...]:
        """The sentences, in their order."""
        if self.template is None:
            return ()
        return (self.template,) if isinstance(self.template, str) else tuple(self.template)

    @classmethod
    def of(
        cls,
        directory: str | Path,
        *,
        template: str | list[str] | tuple[str, ...] | None = None,
        target: str | None = None,
    ) -> Reading:
        """As in the recipe that a trained model carries, if it does.

        Args:
            directory: The model's.
            template: Stands above the recipe's, and so does its target.
            target: Stands above the recipe's.
        """
        file = Path(directory) / RECIPE_FILE
        recipe = read_settings(file) if file.is_file() else {}
        settings = {one.name: recipe[one.name] for one in dataclasses.fields(cls) if one.name in recipe}
        if template is not None:
            settings |= {"template": template, "target": target}
        elif target is not None:
            settings["target"] = target
        return cls(**settings)

    def examples(self, source: Source, bad_rows: BadRows) -> Iterator[Example]:
        """The examples of a source, one at a time; what cannot be used goes to ``bad_rows``."""
        templates = self._templates()
        if self.template_seed is None:
            templates = templates[:1]
        return _read(_example, templates, source, bad_rows, self.template_seed)

    def prompts(self, source: Source, bad_rows: BadRows) -> Iterator[Example]:
        """What comes before the answer in each row: the sentence up to the target, a prompt, a text, a chat.

        The target itself may be missing: it is what is wanted.

        Raises:
            ValueError: If the template begins with the target.
        """
        templates = self._templates()[:1]
        if templates and templates[0].begins_with_target:
            raise ValueError(
                f"the template begins with {{{self.target}}}; a prediction needs some text before it"
            )
        return _read(read_prompt, templates, source, bad_rows, None)

    def _templates(self) -> list[Template]:
        """All of them, so that one that cannot be used is named before any row is read."""
        count, templates = len(self.templates), []
        for index, text in enumerate(self.templates, start=1):
            try:
                templates.append(Template(text, self.target))
            except ValueError as error:
                if count == 1:
                    raise
                raise ValueError(f"template {index} of {count} ({text!r:.60}): {error}") from None
        return templates


def _read(
    read: Callable[[str, Row, Template | None], Example],
    templates: Sequence[Template],
    source: Source,
    bad_rows: BadRows,
    seed: int | None,
) -> Iterator[Example]:
    for index, (where, row) in enumerate(read_rows(source, bad_rows=bad_rows)):
        template = templates[_draw(seed, index, len(templates))] if templates else None
        try:
            example = read(where, row, template)
        except ValueError as error:
            bad_rows.add(where, str(error))
            continue
        yield replace(example, row=row)


def _draw(seed: int | None, index: int, count: int) -> int:
    """One of ``count``, by seed and index alone: no order of reading can change it."""
    if count == 1:
        return 0
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % count


def _example(where: str, row: Row, template: Template | None) -> Example:
    if template is not None:
        before, after = template.render(row)
        return Example(
            before.text,
            after.text,
            where,
            prompt_numbers=before.numbers,
            completion_numbers=after.numbers,
        )
    if "messages" in row:
        messages = read_messages(row["messages"])
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ValueError("no message of the assistant: there is nothing to learn")
        return Example("", "", where, messages)
    if "prompt" in row and "completion" in row:
        completion = _completion(row["completion"])
        return Example(
            _text(row, "prompt", empty=True), completion.text, where, completion_numbers=completion.numbers
        )
    if "text" in row:
        return Example("", _text(row, "text"), where)
    raise ValueError(f"{_fields(row)}: neither text, nor prompt and completion, nor messages{REMEDY}")


def read_prompt(where: str, row: Row, template: Template | None) -> Example:
    """What comes before the answer in one row.

    Raises:
        ValueError: If it has no prompt.
    """
    if template is not None:
        passage = template.prompt(row)
        return Example(passage.text, "", where, prompt_numbers=passage.numbers)
    if "messages" in row:
        messages = list(read_messages(row["messages"]))
        while messages and messages[-1]["role"] == ASSISTANT:
            messages.pop()
        if not messages:
            raise ValueError("no message before the assistant's: there is nothing to answer")
        return Example("", "", where, tuple(messages))
    for name in ("prompt", "text"):
        if name in row:
            return Example(_text(row, name), "", where)
    raise ValueError(f"{_fields(row)}: neither prompt, text nor messages{REMEDY}")


def _fields(row: Row) -> str:
    return f"fields {', '.join(map(str, row)) or 'none'}"


def _text(row: Row, name: str, *, empty: bool = False) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}, not a text")
    if not value.strip() and not empty:
        raise ValueError(f"{name} is empty")
    return value


def _completion(value: Any) -> Passage:
    """A text, or a number: by its type, or as the text that is one from end to end."""
    if not isinstance(value, str):
        number = number_in(value, "completion")
        if number is None:
            raise ValueError(f"completion is {value!r:.40}, neither a text nor a number")
        written = shortest(number)
        return Passage(written, (Number(0, len(written), written, float(number)),))
    if not value.strip():
        raise ValueError("completion is empty")
    try:
        number = number_in(value, "completion")
    except ValueError:  # 1e999: a text like others
        number = None
    if number is None:
        return Passage(value)
    written = value.strip()
    start = value.index(written)
    return Passage(value, (Number(start, start + len(written), written, float(number)),))


def read_messages(value: Any) -> tuple[Mapping[str, str], ...]:
    """The messages of a chat.

    Raises:
        ValueError: If they are none.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"messages is {value!r:.40}, not a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f"a message is {message!r:.40}; each needs role and content")
    return tuple(value)
