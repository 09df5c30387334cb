"""Fields: whether what a row holds is a number, a text, or nothing.

A field is a number if it is one by type, or if its text is one from end to end. The digits do not matter
otherwise: 2721.6018972544634 in a column is a price, although in running text it would be taken for a code.
This module knows neither templates nor files.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from causal_qwen.numbers import format_number, scan

__all__ = ["field", "number_in", "shortest"]

# What people and programs write where a value is missing or is no number (case counts, unlike for nan).
MISSING = frozenset(("NA", "N/A", "n/a", "#N/A", "#NA", "<NA>", "NULL", "null", "NaT"))
NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
NUMERAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
CODE = re.compile(r"\+|-?0\d")  # begins what a number would lose: a plus, leading zeros
SHOWN = 40  # characters of a value in a message
LONGEST_INTEGER = 400  # digits; float64 ends at 309


def field(row: Mapping[str, Any], name: str, *, text: bool = False) -> Any:
    """A field of a row that is there.

    Args:
        row: Names and values.
        name: Of the field.
        text: Whether it is taken as a text, so that "NA" and "nan" are words like others.

    Raises:
        ValueError: If it is missing, empty, NaN or infinite.
    """
    if name not in row:
        near = get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(map(str, row))}"
        raise ValueError(f"no field {name!r}{hint}")
    value = row[name]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{name} is empty")
    if isinstance(value, str) and not text:
        word = value.strip()
        if word in MISSING:
            raise ValueError(f"{name} is {word}; if that is a word, write {{{name}!s}} in the template")
        if NOT_FINITE.fullmatch(word):
            raise ValueError(f"{name} is {word}")
    return value


def number_in(value: Any, name: str, *, wanted: bool = False) -> int | float | None:
    """The number that a field is, or None for a text.

    Args:
        value: Of `field`.
        name: For messages.
        wanted: Whether the field must be a number, as the target must. Then leading zeros, a plus, separators
            of thousands and any number of digits are read; otherwise such texts, and integers that float64
            would change, may be codes and stay text.

    Raises:
        ValueError: If it is NaN, infinite or beyond float64, or no number where one is wanted.
    """
    number: int | float | None = None
    if isinstance(value, bool):
        number = None
    elif isinstance(value, str):
        number = _numeral(value.strip(), wanted)
    elif isinstance(value, numbers.Integral):
        number = int(value)
    elif isinstance(value, numbers.Real | Decimal):
        number = float(value)
    if number is not None and not _is_finite(number):
        raise ValueError(f"{name} is {str(value)[:SHOWN]}, which is no finite number")
    if number is None and wanted:
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
        raise ValueError(
            f"{name} is {shown}, not a number; if the target is a text, write {{{name}!s}} in the template"
        )
    return number


def _numeral(text: str, wanted: bool) -> int | float | None:
    if not NUMERAL.fullmatch(text):
        spans = scan(text) if wanted else []
        return spans[0].value if len(spans) == 1 and spans[0].text == text else None
    if CODE.match(text) and not wanted:
        return None
    value = float(text)
    if not text.lstrip("+-").isdigit() or len(text) > LONGEST_INTEGER:
        return value
    integer = int(text)
    if integer != value and not wanted and math.isfinite(value):
        return None
    return integer


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond float64
        return False


def shortest(number: int | float) -> str:
    """The shortest spelling that reads back as the same number; an integer has all of its digits."""
    if isinstance(number, int):
        return str(number)
    whole = repr(number).removesuffix(".0")
    spelled = format_number(number)  # of fifteen digits at most, 1e22 for 1e+22
    return spelled if float(spelled) == number and len(spelled) <= len(whole) else whole
