"""How eval and predict come by rows: files, and the template that the model was trained with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from causal_qwen.processing_causal_qwen2 import CausalQwen2Processor
    from causal_qwen.training.data import BadRows, Template

__all__ = [
    "DATA_HELP",
    "TARGET_HELP",
    "TEMPLATE_HELP",
    "OnBadRow",
    "Reading",
    "labelled_batches",
    "prompts",
    "reading",
]

DATA_HELP = "JSONL, JSON, CSV, TSV, Parquet or text."
TEMPLATE_HELP = (
    'Sentence of a table\'s row, "A {cut} diamond costs {price}."; the one that the model was trained with '
    "if not given."
)
TARGET_HELP = "Field of the template that is to be predicted."
# Batches whose rows are sorted by length together.
BATCHES_SORTED = 8


class OnBadRow(StrEnum):
    """What a row that cannot be used does."""

    error = "error"
    skip = "skip"


@dataclass(frozen=True)
class Reading:
    """How rows become texts.

    Args:
        template: Sentence of a table's row; None for rows with texts of their own.
        target: Field that is to be predicted.
        completion_only: Whether only completions count.
        append_eos: Whether the end of a text counts.
    """

    template: str | None = None
    target: str | None = None
    completion_only: bool = True
    append_eos: bool = True


def reading(model: str, template: str | None, target: str | None) -> Reading:
    """As given, or else as in the recipe that a trained model carries."""
    recipe = Path(model) / "recipe.yaml"
    if not recipe.is_file():
        return Reading(template, target)
    from causal_qwen.training.recipe import TrainingRecipe

    trained = TrainingRecipe.from_yaml(recipe)
    if template is None:
        template, target = trained.template, target or trained.target
    return Reading(template, target, trained.completion_only, trained.append_eos)


def labelled_batches(
    processor: CausalQwen2Processor,
    data: str,
    how: Reading,
    bad_rows: BadRows,
    *,
    max_length: int,
    batch_size: int,
) -> Iterator[dict[str, Tensor]]:
    """Padded batches with labels, rows of similar length together; a few batches are in memory."""
    from itertools import islice

    from causal_qwen.training.data import Template, read_examples
    from causal_qwen.training.encoding import Collator, Encoder

    tokenizer = processor.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collate = Collator(pad_token_id=0 if pad is None else pad)
    encoder = Encoder(
        processor, max_length=max_length, completion_only=how.completion_only, append_eos=how.append_eos
    )
    template = None if how.template is None else Template(how.template, how.target)
    rows = encoder.rows(read_examples(data, template=template, bad_rows=bad_rows), bad_rows)
    while window := sorted(islice(rows, BATCHES_SORTED * batch_size), key=len):
        for start in range(0, len(window), batch_size):
            yield collate(window[start : start + batch_size])


def prompts(
    processor: CausalQwen2Processor,
    data: str,
    how: Reading,
    bad_rows: BadRows,
) -> Iterator[tuple[str, str]]:
    """(where, prompt) of each row: the sentence up to the target, a prompt, a text, or a chat.

    The target itself may be missing: it is what is asked for.
    """
    from causal_qwen.training.data import Template, read_rows

    asked = None
    if how.template is not None:
        beginning = how.template if how.target is None else before_target(how.template, how.target)
        asked = Template(beginning) if "{" in beginning else beginning
    for where, row in read_rows(data, bad_rows=bad_rows):
        try:
            prompt = _prompt(processor, row, asked)
        except ValueError as error:
            bad_rows.add(where, str(error))
            continue
        yield where, prompt


def before_target(template: str, target: str) -> str:
    """The template up to the field ``target``.

    Raises:
        ValueError: If there is no such field, or nothing before it.
    """
    found = re.search(rf"(?<!\{{)(?:\{{\{{)*\{{{re.escape(target)}\s*[!:}}]", template)
    if found is None:
        raise ValueError(f"the template has no field {target!r}: {template!r}")
    beginning = template[: found.end()].rpartition("{")[0]
    if not beginning.strip():
        raise ValueError(f"the template begins with {{{target}}}; a prediction needs some text before it")
    return beginning


def _prompt(processor: CausalQwen2Processor, row: Mapping[str, Any], asked: Template | str | None) -> str:
    if isinstance(asked, str):
        return asked
    if asked is not None:
        return asked.render(row)[1]
    if "messages" in row:
        messages = list(row["messages"])
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        text: str = processor.apply_chat_template(messages, add_generation_prompt=True)
        return text
    for name in ("prompt", "text"):
        if name in row:
            if not isinstance(row[name], str) or not row[name]:
                raise ValueError(f"{name} is {row[name]!r:.40}; it must be a text")
            return str(row[name])
    raise ValueError(
        f"fields {', '.join(map(str, row)) or 'none'}: neither prompt, text nor messages; "
        "give a template for a table"
    )
