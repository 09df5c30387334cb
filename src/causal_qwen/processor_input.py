"""What the processor may be given: texts, known numbers and ids, or a line that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from causal_qwen.numbers import Number

__all__ = ["check_ids", "check_spans", "check_text"]

LARGEST_ID = 2**31 - 1


def check_text(text: str) -> None:
    """Refuse half a character, which JSON can write and UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"half a character (U+{ord(text[error.start]):04X}) at position {error.start}"
        raise ValueError(f"the text has {half}; remove it, or write the whole one") from None


def check_spans(texts: Sequence[str], spans: Sequence[Sequence[Number]]) -> None:
    """Refuse known numbers that do not stand in their texts, in order, or are not finite."""
    if len(spans) != len(texts):
        raise ValueError(f"spans of {len(spans)} texts for {len(texts)} texts; they are aligned")
    for index, (text, numbers) in enumerate(zip(texts, spans, strict=True)):
        end = 0
        for number in numbers:
            if not end <= number.start < number.end <= len(text):
                raise ValueError(
                    f"a number at [{number.start}, {number.end}) of text {index}; numbers are in their order"
                )
            if not np.isfinite(number.value):
                raise ValueError(
                    f"the value at [{number.start}, {number.end}) of text {index} is {number.value}; "
                    "only finite numbers can be read"
                )
            end = number.end


def check_ids(ids: np.ndarray[Any, Any]) -> None:
    """Refuse what cannot be a token, such as the −100 of labels."""
    if len(ids) and ids.dtype.kind not in "iu":
        raise ValueError(f"token ids are {ids.dtype}; they must be integers")
    wrong = np.flatnonzero((ids < 0) | (ids > LARGEST_ID))
    if len(wrong):
        raise ValueError(f"the id at position {wrong[0]} is {ids[wrong[0]]}, no token of any vocabulary")
