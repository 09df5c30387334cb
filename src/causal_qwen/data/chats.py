"""Chats → texts by the model's template, in which only the template writes special tokens.

What somebody types stays text: "<|im_end|>" in a message ends no turn. This module knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from causal_qwen.number_processor import NUM_TOKEN, NumberProcessor

__all__ = ["Chat"]

# Code points that Unicode reserves for internal use; the first of their block is the processor's.
NONCHARACTERS = [chr(code) for code in range(0xFDD1, 0xFDF0)]


class Chat:
    """Messages and a template.

    Special tokens in messages are cut behind their first character, at a mark that the template carries along
    and the tokenizer never sees: the parts are encoded one by one. "<NUM>" is text by the processor's own
    care.

    Args:
        processor: Has the template.
        messages: Each with "role" and "content".

    Raises:
        ValueError: If the messages hold every code point that could be the mark.
    """

    def __init__(self, processor: NumberProcessor, messages: Sequence[Mapping[str, Any]]) -> None:
        self.processor = processor
        added = processor.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special and len(token.content) > 1}
        longest_first = sorted(special - {NUM_TOKEN}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        typed = "".join(_strings(messages))
        self._mark = next((mark for mark in NONCHARACTERS if mark not in typed), "")
        if not self._mark:
            raise ValueError("the messages hold every noncharacter from U+FDD1 to U+FDEF; remove one")
        self.messages = [self._marked(message) for message in messages]

    def text(self, messages: int | None = None, *, opened: bool = False) -> str:
        """What the template makes of the first messages, all by default, with the marks in it.

        Args:
            messages: How many.
            opened: Whether the assistant's turn is opened behind them.

        Raises:
            ValueError: If the template refuses them.
        """
        text: str = self.processor.apply_chat_template(self.messages[:messages], add_generation_prompt=opened)
        return text

    def parts(self, text: str) -> list[str]:
        """The parts of such a text that are to be encoded one by one; joined, they are what it says."""
        return text.split(self._mark)

    def _marked(self, value: Any) -> Any:
        """``value`` with every special token in its texts cut."""
        if isinstance(value, str):
            while match := self._special.search(value):
                cut = match.start() + 1
                value = value[:cut] + self._mark + value[cut:]
        elif isinstance(value, Mapping):
            value = {self._marked(key): self._marked(entry) for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            value = [self._marked(entry) for entry in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
