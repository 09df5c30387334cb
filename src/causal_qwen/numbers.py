"""Text and its numbers: `scan` finds them, `format_number` spells one, `write` puts them back.

One principle decides every case: *text becomes a value only where the value loses nothing*. "99.9" is a
number, "007" is a name. This module knows no tokens, no tensors and no locale; it sees characters.

**Words and joiners.** A *word character* is a digit, an underscore, a combining mark or a letter of a cased
alphabet (Latin, Greek, Cyrillic, Armenian). Scripts without case (Chinese, Japanese, Korean, Thai, Arabic,
...) are ordinary neighbours of a number: 第3章, 99.9元, 2024年. One *joiner* (- . / : @) between two word
characters makes them one *chunk*, and a chunk is read as a whole or left as a whole. It is read when it is

- one number: 5, 5.0, .5, 1,234,567.89, 6.02e23, 1E-5;
- a number and a symbol of `UNITS`: 5kg, 3rd, 10k. Any other letters make a code: 3D, 5G, A4, H2O, 0x1F, 10²;
- one of these with "/" and letters or "-" and lower-case words: 60km/h, 5/day, 5-year-old (but not 3-D, 5.x,
  2-in-1);
- two of these with one "-" or "/" between, a range, a subtraction or a fraction: 3-5, 10-20kg, 1/2. Three are
  a date, a telephone number, a code: 2026-11-15, 12/25/2024. Two points are a version or an address:
  10.0.0.1.

A ":" after a digit is a time, a ratio or an address and stays text (12:30, 16:9); after a letter it is
punctuation (price:5). Every other joiner ties digits to the word before: Fig.5, A-4, user@5. A joiner that no
word character follows is punctuation: "5." is 5 and a full stop, "5..7" is 5 and 7.

**Signs.** A minus (ASCII, U+2212 or full-width) belongs to the number only where it can be nothing else: at
the start, after white space, an opening bracket, a quotation mark, a separator, an operator, a currency sign
that begins an amount, or a Chinese, Japanese or Korean letter (气温-5℃). After such a letter it is a range if
the letter alone follows a number (3月-5月) or if the same unit stands on both sides (10公里-20公里).
Elsewhere it stays text and the number has no sign: 3-5, 5%-8%, (a)-2, --4, -$4. A plus always stays text: a
value could not give it back. A leading point (.5) stands where a sign could, or behind one; elsewhere (").5")
nobody can say what it is, and the digits stay text.

**Commas.** One to three digits and groups of three to the end are one number: 1,234,567.89. Otherwise a comma
separates numbers: 1,2,3 and 1,23,456 are three, 3,14 is two. The full-width comma always separates.

**Digits that a value would lose** stay text: leading zeros (007, 00.5), more than 15 significant digits
(zeros at the end of an integer are not significant), magnitudes that float64 turns into infinity or zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

__all__ = [
    "MAX_DIGITS",
    "SEPARATOR",
    "UNITS",
    "Number",
    "begins_thousands",
    "ends_in_digit",
    "format_number",
    "scan",
    "spread_of",
    "write",
]

MAX_DIGITS = 15
"""Significant digits that every float64 keeps: up to here decimal → float64 → decimal is the identity."""

SEPARATOR = " "
"""What stands between digits and a number that nothing separates: 12 and 13 must not become 1213."""

UNITS = frozenset(
    unit
    for units in (
        "nm um µm μm mm cm dm m km ft in yd mi mm2 cm2 m2 km2 ft2 mm3 cm3 m3 mm² cm² m² km² ft² mm³ cm³ m³",
        "ng ug µg μg mcg mg g kg t lb lbs oz ha ul µl μl uL µL μL ml mL cl cL dl dL l L gal",
        "ns us µs μs ms s sec secs min mins h hr hrs yr yrs am pm AM PM rpm mph kph kmh Hz kHz MHz GHz THz",
        "mV V kV mA mAh Ah mW W kW MW GW TW Wh kWh MWh GWh TWh Ω \u2126 kΩ MΩ pF nF uF µF μF lx lm dB dBm",
        "J kJ MJ cal kcal eV keV MeV GeV TeV N kN Pa hPa kPa MPa GPa bar mbar psi mol mmol ppm ppb",
        "bit bits kb Mb Gb kB KB MB GB TB PB KiB MiB GiB TiB bps kbps Mbps Gbps fps px pt em rem dpi ppi MP",
        "USD EUR GBP CNY RMB JPY bp pp k K M B T mn bn tn x st nd rd th º ª",
    )
    for unit in units.split()
)
"""What may follow a number without a space (case counts): measures, magnitudes, currencies, ordinals."""

# Smallest and largest power of ten for which a number is written out; beyond, people write 1e-5 and 1e15.
_PLAIN_EXPONENTS = range(-4, 15)
_LARGEST = 1.79769313486231e308  # the largest float64 of 15 digits; more digits would round up to infinity

_TO_ASCII = str.maketrans(
    {0x2212: "-", 0xFF0D: "-", 0xFF0E: ".", **{0xFF10 + digit: str(digit) for digit in range(10)}}
)
_POINTS = frozenset(".\uff0e")
_MINUSES = frozenset("-\u2212\uff0d")
_PREFIXES = _MINUSES | _POINTS
_OPENING_JOINERS = frozenset(":/\uff1a\uff0f")
_OPENING = _OPENING_JOINERS | frozenset(
    "([{<>=\"'`,;!?|&*^~\u00ab\u00d7\u00f7\u2013\u2014\u2018\u201c\u2026\u2192\u2248\u2260\u2264\u2265"
    "\u3001\u3002\u3008\u300a\u300c\u300e\u3010\uff01\uff08\uff0c\uff1b\uff1c\uff1d\uff1e\uff1f\uff3b\uff5b\uff5e"
)
_CURRENCY = frozenset("$\u00a2\u00a3\u00a5\u20a9\u20ab\u20ac\u20b9\u20bd\uff04\uffe1\uffe5")
_CJK = "\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\U00020000-\U0003ffff"

# Sets for use inside [...].
_DIGIT = "0-9\uff10-\uff19"
_POINT = ".\uff0e"
_HYPHEN = r"\-\u2010\u2011"
_MINUS = r"\-\u2212\uff0d"
_TIE = rf"{_POINT}{_HYPHEN}\u2212\uff0d/\uff0f@"
_JOINER = rf"{_TIE}:\uff1a"
_WORD = (
    rf"{_DIGIT}_A-Za-z\xaa\xb2\xb3\xb5\xb9\xba\xbc-\xbe\xc0-\xd6\xd8-\xf6\xf8-\u0588"  # up to Armenian
    r"\u1d00-\u1fff\u2070-\u209c\u20d0-\u20ff\u2126\u212a\u212b\u2150-\u218b"  # superscripts, keycaps
    r"\u2c60-\u2c7f\ua720-\ua7ff\ufe00-\ufe0f\uff21-\uff3a\uff41-\uff5a\U0001d400-\U0001d7ff"
)

# The patterns continue behind a digit that is already consumed: a pattern that begins with a plain set lets
# `re` skip number-free text at full speed, and look-behinds can reach over that digit. Whatever repeats is
# possessive, and a failed attempt is followed by _REST, which consumes what the attempt saw, except comma
# groups; those are tried only at the head of a list. So each character is looked at a bounded number of
# times.
_GROUPS = (
    rf"(?<=[1-9\uff11-\uff19])(?<![{_DIGIT}],[{_DIGIT}])"
    rf"(?:(?<![{_POINT}][{_DIGIT}])|(?<=[{_POINT}][{_POINT}][{_DIGIT}]))"
    rf"[{_DIGIT}]{{0,2}}+(?:,[{_DIGIT}]{{3}})++(?!,?[{_DIGIT}])"
)
_FRACTION = rf"(?:[{_POINT}][{_DIGIT}]++)?+"
_EXPONENT = rf"(?:[eE][+{_MINUS}]?+[{_DIGIT}]++)?+"
_NUMBER = rf"(?>{_GROUPS}{_FRACTION}(?!,[{_DIGIT}])|[{_DIGIT}]*+{_FRACTION}{_EXPONENT})"
# Short, ASCII, no exponent, no groups: `float` reads it and nothing has to be checked.
_SIMPLE = rf"(?:(?<=[1-9])[0-9]{{0,8}}+|(?<=0))(?:\.[0-9]{{1,5}}+)?+(?!,[{_DIGIT}]{{3}})"
_END = rf"(?![{_WORD}]|[{_JOINER}][{_WORD}])"
_PER = r"[/\uff0f][A-Za-z]++[23\xb2\xb3]?+"
_COMPOUND = rf"[{_HYPHEN}][a-z]{{2,}}+(?:[{_HYPHEN}][a-z]++)*+"
_TAIL = rf"(?:{_PER}|{_COMPOUND})?+{_END}"
_SECOND = rf"[{_TIE}](?<![.\uff0e@])([{_DIGIT}]{_NUMBER})([{_WORD}]*+){_TAIL}"
_REST = rf"[{_WORD}]*+(?:(?:[{_JOINER}]|(?<=[{_DIGIT}][eE])\+)[{_WORD}]++)*+"
_FREE = rf"(?<![{_WORD}][{_DIGIT}])(?<![{_WORD}][{_TIE}][{_DIGIT}])"
_MEASURE = rf"({_NUMBER})(?:{_END}|([{_WORD}]*+)(?:{_TAIL}|{_SECOND}))"
_CHUNK = re.compile(rf"[{_DIGIT}](?:{_FREE}(?:({_SIMPLE}){_END}|{_MEASURE})|{_REST})")
_GROUPED = re.compile(rf"[{_DIGIT}]{_GROUPS}{_FRACTION}(?!,[{_DIGIT}])")
# What may still become thousands of the number before it, or just has.
_OPEN_GROUPS = re.compile(
    rf"(?:,[{_DIGIT}]{{3}})*+(?:,[{_DIGIT}]{{0,2}})?|(?:,[{_DIGIT}]{{3}})++(?:[{_POINT}][{_DIGIT}]*+)?,?"
)
_WORD_CHARACTER = re.compile(rf"[{_WORD}]")
_CJK_LETTER = re.compile(rf"[{_CJK}]")
# A unit of up to eight letters between a number and a minus; the bound keeps the look-behind short.
_COUNTED = re.compile(rf"[{_DIGIT}]([{_CJK}]{{1,8}})\Z")


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text: `text` is what stands at [start, end), `value` is its meaning in float64."""

    start: int
    end: int
    text: str
    value: float


_set_start, _set_end, _set_text, _set_value = (vars(Number)[field].__set__ for field in Number.__slots__)


def _number(start: int, end: int, text: str, value: float) -> Number:
    """A `Number`, sooner: a frozen `__init__` looks each field up by name, which costs half of a scan."""
    number = object.__new__(Number)
    _set_start(number, start)
    _set_end(number, end)
    _set_text(number, text)
    _set_value(number, value)
    return number


def scan(text: str) -> list[Number]:
    """Find the numbers of a text, in order and without overlap, by the rules at the head of this module.

    Time and memory are linear in the length of the text. No string raises.

    Args:
        text: Any string, lone surrogates and control characters included.

    Returns:
        The numbers; `text[n.start:n.end] == n.text` for each. Everything between them is text.
    """
    return _scan(text, 0, len(text))


def _scan(text: str, begin: int, stop: int) -> list[Number]:
    """The numbers of text[begin:stop], read in the context of the whole text."""
    numbers: list[Number] = []
    for chunk in _CHUNK.finditer(text, begin, stop):
        last = chunk.lastindex
        if last is None:
            continue
        start, end = chunk.span()
        if last == 1 and (start == 0 or text[start - 1] not in _PREFIXES):
            span = text[start:end]
            numbers.append(_number(start, end, span, float(span)))
        else:
            numbers += _measure(text, chunk)
    return numbers


def _measure(text: str, chunk: re.Match[str]) -> list[Number]:
    """The one or two numbers of a chunk; none if one of them must stay text or letters are not a unit."""
    end = chunk.end(1) if chunk[2] is None else chunk.end(2)
    start = _opening(text, chunk.start(), end)
    numbers = [None if start is None else _read(text, start, end)]
    if chunk[4] is not None:
        numbers.append(_read(text, *chunk.span(4)))
    if all(unit in UNITS for unit in chunk.group(3, 5) if unit):
        readable = [number for number in numbers if number is not None]
        if len(readable) == len(numbers):
            return readable
    # A code ends at a comma (A-1,200): what looked like a thousands group of its second number is a list.
    comma = text.find(",", *chunk.span(4)) if chunk[4] is not None else -1
    return [] if comma < 0 else _scan(text, comma, chunk.end())


def _opening(text: str, start: int, end: int) -> int | None:
    """Where the number with digits at [start, end) begins: there, at a sign, at a point; None if unclear."""
    before = text[start - 1 : start]
    if before in _MINUSES:
        return start - 1 if _opens(text, start - 1, end) else start
    if before not in _POINTS:
        return start
    before = text[start - 2 : start - 1]
    if before in _POINTS:
        return start  # an ellipsis
    if not _POINTS.isdisjoint(text[start:end]):
        return None  # one point too many: .5.0
    if before in _MINUSES:
        return start - 2 if _opens(text, start - 2, end) else None
    # Written as "0.5" behind ":" or "/" the number would be tied to what stands before.
    return start - 1 if before not in _OPENING_JOINERS and _opens(text, start - 1, end) else None


def _opens(text: str, start: int, end: int) -> bool:
    """Whether the minus or point at `start` can only be the beginning of the number that ends at `end`."""
    if start == 0:
        return True
    before = text[start - 1]
    if before in _OPENING or before.isspace():
        return True
    if before in _CURRENCY:
        return _WORD_CHARACTER.match(text[start - 2 : start - 1]) is None
    if _CJK_LETTER.match(before) is None:
        return False
    counted = _COUNTED.search(text, max(0, start - 9), start)
    return counted is None or (len(counted[1]) > 1 and not text.startswith(counted[1], end))


def _read(text: str, start: int, end: int) -> Number | None:
    """The number at [start, end), or None where a value would lose it."""
    span = text[start:end]
    spelled = (span if span.isascii() else span.translate(_TO_ASCII)).replace(",", "")
    mantissa = spelled.lower().partition("e")[0].removeprefix("-")
    whole, _, fraction = mantissa.partition(".")
    significant = (whole + fraction).lstrip("0") if fraction else whole.rstrip("0")
    if len(significant) > MAX_DIGITS or (len(whole) > 1 and whole[0] == "0"):
        return None
    value = float(spelled)
    if math.isinf(value) or (value == 0.0 and significant):
        return None
    return _number(start, end, span, value)


def format_number(value: float, spread: float | None = None) -> str:
    """Spell a value: the shortest text that `scan` reads back, rounded to what a spread supports.

    Written out for 1e-4 ≤ |value| < 1e15, in scientific notation beyond (1e-5, 6.02e23); no separators, no
    plus. A value of more than 15 significant digits, which no text that `scan` reads can have, is rounded to
    15 first. Negative zero is "-0"; a value that is *rounded* to zero is "0".

    Args:
        value: A finite number.
        spread: The uncertainty of the value in its own units. The value is rounded at the leading digit of
            the spread (99.8734 with spread 0.3 is "99.9", 1234567 with spread 2e5 is "1200000"), so that the
            text is within half a spread of it. None and 0 round nothing.

    Raises:
        ValueError: The value is NaN, infinite or beyond float64, or the spread is negative, NaN or infinite.
    """
    value = _float(value)
    if not math.isfinite(value):
        raise ValueError(f"cannot write {value!r} as a number: it is not finite; clip it or drop it")
    if spread is not None:
        value = _round(value, _float(spread))
    if value == 0.0:
        return repr(value).removesuffix(".0")
    value = max(-_LARGEST, min(value, _LARGEST))
    exact = Decimal(repr(value))
    digits, exponent = "".join(map(str, exact.as_tuple().digits)).rstrip("0"), exact.adjusted()
    if len(digits) > MAX_DIGITS:
        mantissa, _, power = f"{abs(value):.{MAX_DIGITS - 1}e}".partition("e")
        digits, exponent = mantissa.replace(".", "").rstrip("0"), int(power)
    return ("-" if value < 0 else "") + _place(digits, exponent)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf if value > 0 else -math.inf


def spread_of(lower: float, upper: float) -> float | None:
    """Half an interval: what rounds the number inside it, wherever one is written. None, which rounds
    nothing, where the interval is a point or has no end.
    """
    half = upper / 2 - lower / 2  # halved first: both ends may be the largest float
    return half if 0.0 < half < math.inf else None


def _place(digits: str, exponent: int) -> str:
    """Set the decimal point: `digits` are significant, the first of them counts 10**exponent."""
    if exponent not in _PLAIN_EXPONENTS:
        return f"{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{exponent}"
    if exponent < 0:
        return "0." + "0" * (-exponent - 1) + digits
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{whole}.{fraction}" if fraction else whole


def _round(value: float, spread: float) -> float:
    """Round a value at the leading digit of its spread."""
    if not (math.isfinite(spread) and spread >= 0.0):
        raise ValueError(f"spread is {spread!r}, but must be finite and not negative; without one, use None")
    if spread == 0.0 or value == 0.0:
        return value
    try:
        rounded = round(value, -Decimal(repr(spread)).adjusted())
    except OverflowError:  # the next round number is beyond float64
        return value
    return rounded or 0.0  # no sign is left of what has been rounded away


def begins_thousands(text: str, start: int, end: int, *, ended: bool = True) -> bool | None:
    """Whether a number with digits at [start, end) would be read as the head of a thousands group; None where
    the text goes on and what follows decides.
    """
    if not ended and end - start < 4 and _OPEN_GROUPS.fullmatch(text, end):
        return None
    return text.startswith(",", end) and _GROUPED.match(text, start) is not None


def ends_in_digit(text: str) -> bool:
    """Whether a number right behind the text would be read as more of its digits."""
    return "0" <= text[-1:] <= "9"


def write(gaps: Sequence[str], values: Sequence[float], spreads: Sequence[float | None] | None = None) -> str:
    """Put numbers back between pieces of text: gaps[0] values[0] gaps[1] ... values[n-1] gaps[n].

    For the gaps and values of a scanned text, `scan` reads the same values between the same gaps again,
    although the numbers may be spelled differently. `format_number` alone cannot promise that: "1.0,200"
    would become "1,200". So a number that would begin a thousands group keeps a ".0". A number right behind a
    digit, another number's or the text's, which no scanned text has, gets a `SEPARATOR`.

    Args:
        gaps: The text around the numbers, one piece more than there are values.
        values: Finite numbers.
        spreads: The uncertainty of each value, see `format_number`.

    Raises:
        ValueError: The lengths do not fit, or `format_number` refuses a value (its position is named).
    """
    spreads = [None] * len(values) if spreads is None else spreads
    if len(gaps) != len(values) + 1 or len(spreads) != len(values):
        raise ValueError(
            f"{len(values)} values need {len(values) + 1} gaps and {len(values)} spreads, "
            f"but there are {len(gaps)} and {len(spreads)}"
        )
    parts = [gaps[0]]
    for position, (value, spread, gap) in enumerate(zip(values, spreads, gaps[1:], strict=True)):
        try:
            parts += format_number(value, spread), gap
        except ValueError as error:
            raise ValueError(f"value {position}: {error}") from None
    for index in range(0, len(parts) - 1, 2):
        if ends_in_digit(parts[index] or "".join(parts[max(index - 1, 0) : index])):
            parts[index] += SEPARATOR
    text = "".join(parts)
    end = 0
    for index, part in enumerate(parts):
        start, end = end, end + len(part)
        if index % 2 and begins_thousands(text, start + part.startswith("-"), end):
            parts[index] += ".0"
    return "".join(parts)
