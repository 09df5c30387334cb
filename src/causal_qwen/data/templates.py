"""A sentence with fields: what a table's row says, before its target and from there on.

A field that is a number is known to be one: its place and its value go with the text. This module knows
neither files nor tokens.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from causal_qwen.data.fields import field, number_in, shortest
from causal_qwen.numbers import Number

__all__ = ["Passage", "Template"]

# Literal text, field, format and conversion, as string.Formatter parses them.
Part = tuple[str, str | None, str | None, str | None]
LARGEST_FORMAT = 1000  # of width and precision: a row has the length of a sentence
OTHER_NOTATIONS = tuple("bcoxX")  # formats of integers that are not written in decimal digits
DIGITS = re.compile(r"\d[\d,_]*(?:\.\d*)?(?:[eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class Passage:
    """A text, and those of its numbers that are fields.

    Args:
        text: All of it.
        numbers: In their order; others may stand in the text, for `scan` to find.
    """

    text: str
    numbers: tuple[Number, ...] = ()


class Template:
    """A sentence with fields, as in "A {carat} carat diamond costs {price} dollars."

    A field that is a number is written in the shortest form that reads back, or as its format says. In a
    prompt its value is what the text shows, {carat:.1f} one decimal; the target's is the row's own, with
    every digit. {name!s} takes a field as text, and the text is read as any other.

    Args:
        text: In the syntax of str.format; "{Year:.4}" takes four characters of a text.
        target: The field with which the completion begins, a number unless it is written {target!s}; None
            learns the whole sentence.

    Raises:
        ValueError: If the text has no field, or not the target, or a format is wider than 1000 characters.
    """

    def __init__(self, text: str, target: str | None = None) -> None:
        try:
            parts: list[Part] = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"the template {text!r} cannot be read: {error}") from None
        fields = [name for _, name, _, _ in parts if name is not None]
        if not fields or not all(fields):
            raise ValueError(f"the template {text!r} needs fields by name, such as {{price}}")
        for _, name, spec, conversion in parts:
            _check_format(name, spec, conversion, is_target=name is not None and name == target)
        self.target = target
        if target is None:
            self._before, self._after = [], parts
            return
        if target not in fields:
            raise ValueError(f"the template has no field {target!r}; its fields are {', '.join(fields)}")
        index = next(index for index, part in enumerate(parts) if part[1] == target)
        literal, _, spec, conversion = parts[index]
        self._before = [*parts[:index], (literal, None, None, None)]
        self._after = [("", target, spec, conversion), *parts[index + 1 :]]

    def render(self, row: Mapping[str, Any]) -> tuple[Passage, Passage]:
        """What stands before the target and from there on; without a target the first is empty.

        Raises:
            ValueError: If a field is missing, empty, NaN or infinite, its format does not fit, or the target
                is no number.
        """
        return self._write(self._before, row), self._write(self._after, row)

    def prompt(self, row: Mapping[str, Any]) -> Passage:
        """The sentence before the target, which the row need not have; without a target, all of it.

        Raises:
            ValueError: As for `render`, of the fields that come before the target.
        """
        return self._write(self._after if self.target is None else self._before, row)

    @property
    def begins_with_target(self) -> bool:
        """Whether nothing comes before the target, so that there is no prompt."""
        blank = all(name is None and not literal.strip() for literal, name, _, _ in self._before)
        return self.target is not None and blank

    def _write(self, parts: Iterable[Part], row: Mapping[str, Any]) -> Passage:
        """The parts with the fields of the row in their places."""
        text = ""
        numbers: list[Number] = []
        for literal, name, spec, conversion in parts:
            text += literal
            if name is None:
                continue
            value = field(row, name, text=bool(conversion))
            if conversion:
                text += _formatted(string.Formatter().convert_field(value, conversion), name, spec)
                continue
            is_target = name == self.target
            number = number_in(value, name, wanted=is_target)
            if number is None:
                text += _formatted(value, name, spec)
                continue
            try:
                written = _formatted(number, name, spec) if spec else shortest(number)
            except ValueError:
                if not isinstance(value, str) or is_target:
                    raise
                text += _formatted(value, name, spec)  # {Year:.4} of "1970" in a CSV file
                continue
            if not (spec and spec.endswith(OTHER_NOTATIONS)):
                numbers.append(_known(number, name, spec or "", written, len(text), exact=is_target))
            text += written
        return Passage(text, tuple(numbers))


def _check_format(name: str | None, spec: str | None, conversion: str | None, *, is_target: bool) -> None:
    """Formats are bounded, and say nothing but how a field is written."""
    if conversion and conversion not in "sra":
        raise ValueError(f"{{{name}!{conversion}}}: a conversion is !s, !r or !a")
    if not spec:
        return
    if "{" in spec or "}" in spec:
        raise ValueError(f"{{{name}:{spec}}}: a format has no fields of its own; write its width as a number")
    for size in re.findall(r"\d+", spec):
        if len(size) > len(str(LARGEST_FORMAT)) + 3 or int(size) > LARGEST_FORMAT:
            raise ValueError(
                f"{{{name}:{spec[:40]}}}: width and precision are at most {LARGEST_FORMAT}, not {size[:20]}"
            )
    if is_target and not conversion and spec.endswith(OTHER_NOTATIONS):
        raise ValueError(f"{{{name}:{spec}}}: a target is written in decimal digits, or as text {{{name}!s}}")


def _formatted(value: Any, name: str, spec: str | None) -> str:
    try:
        return format(value, spec or "")
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} is {value!r:.40}, which {{{name}:{spec}}} cannot write") from None


def _known(number: int | float, name: str, spec: str, written: str, offset: int, *, exact: bool) -> Number:
    """Where a written number stands in a text, and its value: the row's own, or what the digits show."""
    digits = DIGITS.search(written)
    whole = float(number) * (100.0 if spec.endswith("%") else 1.0)
    if digits is None or not math.isfinite(whole):  # the percentage of a number near the end of float64
        raise ValueError(f"{name} is {number!r}, which {{{name}:{spec}}} cannot write")
    is_negative = math.copysign(1.0, number) < 0 and "-" in written
    start = written.index("-") if is_negative else digits.start()  # padding may stand between them
    shown = float(digits[0].replace(",", "").replace("_", "")) * (-1.0 if is_negative else 1.0)
    value = shown if spec and not exact and math.isfinite(shown) else whole
    return Number(offset + start, offset + digits.end(), written[start : digits.end()], value)
