"""Numbers in text: what is read is what is written back, and values are spelled so that they are read."""

import json
import math

from hypothesis import strategies as st

from causal_qwen.numbers import format_number, scan, write
from causal_qwen.writing import Writer
from fuzzing.inputs import ODD_TEXT, Drawn
from fuzzing.target import Target

__all__ = ["TARGETS", "check_scanning", "check_streaming", "check_writing", "parts"]


def parts(text: str) -> tuple[list[str], list[float]]:
    """The gaps and the values of a text, and a check of what `scan` promises about spans."""
    gaps, end = [], 0
    numbers = scan(text)
    for number in numbers:
        assert end <= number.start < number.end <= len(text)
        assert text[number.start : number.end] == number.text
        assert math.isfinite(number.value)
        gaps.append(text[end : number.start])
        end = number.end
    return [*gaps, text[end:]], [number.value for number in numbers]


def check_scanning(data: bytes) -> None:
    """scan → write → scan: the numbers may be spelled anew, but values and text are the same."""
    text = json.loads(data)
    gaps, values = parts(text)
    again = write(gaps, values)
    gaps_again, values_again = parts(again)
    assert gaps_again == gaps
    assert [value.hex() for value in values_again] == [value.hex() for value in values]
    assert write(gaps_again, values_again) == again


def check_writing(data: bytes) -> None:
    """A value is spelled by at most 15 digits that are read back as one number, within half a spread."""
    value, spread = json.loads(data)
    text = format_number(value, spread)
    (number,) = scan(text)
    assert number.text == text
    assert format_number(number.value) == text
    error = 6e-15 * abs(value) + (0.5001 * spread if spread else 0.0)
    assert abs(number.value - value) <= error or math.isinf(error)


def check_streaming(data: bytes) -> None:
    """Written piece by piece, a text is what it is when it is written at once."""
    gaps, values = json.loads(data)
    writer = Writer()
    pieces = [writer.add(gaps[0])]
    for value, gap in zip(values, gaps[1:], strict=True):
        pieces += [writer.add_number(value), *map(writer.add, gap)]
    pieces.append(writer.end())
    assert "".join(pieces) == write(gaps, values)


NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), 5e-324, 1.7976931348623157e308])
FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2000, 2000).map(float)
GAP = st.sampled_from(["", ",", ", ", ",2", ",200", ",200,", "000", "-", ".", " ", "e3", "kg"]) | ODD_TEXT
TARGETS = (
    Target(name="scanning", source=Drawn(ODD_TEXT), check=check_scanning, share=200),
    Target(
        name="writing",
        source=Drawn(st.tuples(NUMBERS, st.none() | NUMBERS)),
        check=check_writing,
        share=60,
    ),
    Target(
        name="streaming",
        source=Drawn(
            st.lists(FINITE, max_size=5).flatmap(
                lambda values: st.tuples(
                    st.lists(GAP, min_size=len(values) + 1, max_size=len(values) + 1), st.just(values)
                )
            )
        ),
        check=check_streaming,
        share=40,
    ),
)
