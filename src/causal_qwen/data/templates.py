"""A sentence with fields: what a table's row says, before its target and from there on.

This module knows neither files nor tokens.
"""

from __future__ import annotations

import difflib
import math
import string
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Template"]

# Literal text, field, format and conversion, as string.Formatter parses them.
Part = tuple[str, str | None, str | None, str | None]


class Template:
    """A sentence with fields, as in "A {carat} carat diamond costs {price} dollars."

    Args:
        text: In the syntax of str.format; "{Year:.4}" takes four characters.
        target: The field with which the completion begins; None learns the whole sentence.

    Raises:
        ValueError: If the text has no field, or not the target.
    """

    def __init__(self, text: str, target: str | None = None) -> None:
        try:
            parts: list[Part] = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"the template {text!r} cannot be read: {error}") from None
        fields = [name for _, name, _, _ in parts if name is not None]
        if not fields or not all(fields):
            raise ValueError(f"the template {text!r} needs fields by name, such as {{price}}")
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

    def render(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """The texts before and from the target on; without a target the first is empty.

        Raises:
            ValueError: If a field is missing, empty, NaN or infinite, or its format does not fit.
        """
        return _write(self._before, row), _write(self._after, row)

    def prompt(self, row: Mapping[str, Any]) -> str:
        """The sentence before the target, which the row need not have; without a target, all of it.

        Raises:
            ValueError: As for `render`, of the fields that come before the target.
        """
        return _write(self._after if self.target is None else self._before, row)

    @property
    def begins_with_target(self) -> bool:
        """Whether nothing comes before the target, so that there is no prompt."""
        blank = all(name is None and not literal.strip() for literal, name, _, _ in self._before)
        return self.target is not None and blank


def _write(parts: Iterable[Part], row: Mapping[str, Any]) -> str:
    """The parts with the fields of the row in their places."""
    text = ""
    for literal, name, spec, conversion in parts:
        text += literal
        if name is None:
            continue
        value = _field(row, name)
        if conversion:
            value = string.Formatter().convert_field(value, conversion)
        try:
            text += format(value, spec or "")
        except (ValueError, TypeError):
            raise ValueError(f"{name} is {value!r}, which {{{name}:{spec}}} cannot write") from None
    return text


def _field(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row that can be written."""
    if name not in row:
        near = difflib.get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(map(str, row))}"
        raise ValueError(f"no field {name!r}{hint}")
    value = row[name]
    if value is None or value == "":
        raise ValueError(f"{name} is empty")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if isinstance(value, str) and value.strip().lower() in ("nan", "inf", "-inf", "infinity"):
        raise ValueError(f"{name} is {value}")
    return value
