"""A table of cases, the laws of `scan`, `format_number` and `write`, and inputs that hang a careless scan."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causal_qwen import numbers
from causal_qwen.numbers import MAX_DIGITS, UNITS, Number, format_number, scan, write
from number_cases import CASES

_scan = numbers._scan


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[ascii(text) for text, _ in CASES])
def test_case(text, expected):
    numbers = scan(text)
    assert [(n.text, n.value) for n in numbers] == expected
    assert [math.copysign(1, n.value) for n in numbers] == [math.copysign(1, value) for _, value in expected]


@pytest.mark.parametrize("separator", [" ", "\n", ";\t"])
def test_a_case_is_the_same_in_a_document(separator):
    """The start and the end of a text are no other context than white space."""
    document = separator.join(text for text, _ in CASES)
    assert [(n.text, n.value) for n in scan(document)] == [pair for _, pairs in CASES for pair in pairs]


def test_spans_are_string_indices():
    assert scan("价格是99.9元, -3") == [Number(3, 7, "99.9", 99.9), Number(10, 12, "-3", -3.0)]


@pytest.mark.parametrize("unit", sorted(UNITS))
def test_every_unit_may_follow_a_number(unit):
    assert [n.text for n in scan(f"7{unit}, 7 {unit}")] == ["7", "7"]


# Arbitrary text, and text from pieces that meet in every way which the rules distinguish.
ANY_TEXT = st.text(st.characters(exclude_categories=()))
PIECES = [
    *"0123456789--..,,::/@+%$ \n()eEDakg_~#",
    *"\u2212\uff0d\uff0e\uff0c\uff1a\uff0f\u2010\u2013\uff15\u00bd\u00b2\u0302\u00e9\u044f\ud800\x00月元",
    *("1.0", "200", "000", "1e3", "0.2e3", "e-7", "公里", "kg", "m/s", "-year", "100000000000000000"),
]
NASTY_TEXT = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)


def parts(text: str) -> tuple[list[str], list[float]]:
    """The gaps and the values of a text, and a check of everything that `scan` promises about spans."""
    gaps, end = [], 0
    numbers = scan(text)
    for number in numbers:
        assert end <= number.start < number.end <= len(text)
        assert text[number.start : number.end] == number.text
        gaps.append(text[end : number.start])
        end = number.end
    return [*gaps, text[end:]], [number.value for number in numbers]


def significant_digits(text: str) -> int:
    mantissa = text.lower().partition("e")[0].lstrip("-\u2212\uff0d").replace(",", "").replace("\uff0e", ".")
    return len(mantissa.replace(".", "").lstrip("0") if "." in mantissa else mantissa.strip("0"))


def bits(values: list[float]) -> list[str]:
    """Values with the sign of zero, for comparison."""
    return [value.hex() for value in values]


@settings(max_examples=2000, deadline=None)
@given(st.one_of(ANY_TEXT, NASTY_TEXT))
def test_any_text_is_scanned_and_written_back(text):
    gaps, values = parts(text)
    for number in scan(text):
        assert type(number.value) is float
        assert math.isfinite(number.value)
        assert significant_digits(number.text) <= MAX_DIGITS
        assert not any(c.isspace() or c.isalpha() for c in number.text.replace("e", "").replace("E", ""))
    # scan → write → scan: the numbers may be spelled anew, but values and text are the same.
    again = write(gaps, values)
    gaps_again, values_again = parts(again)
    assert gaps_again == gaps
    assert bits(values_again) == bits(values)
    assert write(gaps_again, values_again) == again


@settings(max_examples=200, deadline=None)
@given(st.one_of(NASTY_TEXT, ANY_TEXT), st.one_of(NASTY_TEXT, ANY_TEXT))
def test_lines_are_scanned_independently(first, second):
    assert parts(f"{first}\n{second}")[1] == parts(first)[1] + parts(second)[1]


FINITE = st.floats(allow_nan=False, allow_infinity=False)
SHORT = st.builds(  # every float64 that some text of at most 15 digits means
    lambda digits, exponent: float(f"{digits}e{exponent}"),
    st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1),
    st.integers(-330, 293),
)


@settings(max_examples=300, deadline=None)
@given(SHORT | st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1e15, 1e14, 1e-4, 1e-5]))
def test_a_formatted_value_is_read_back_exactly(value):
    if len(Decimal(repr(value)).normalize().as_tuple().digits) > MAX_DIGITS:
        value = float(f"{value:.14e}")
    text = format_number(value)
    (number,) = scan(text)
    assert number.text == text
    assert bits([number.value]) == bits([value])


@settings(max_examples=300, deadline=None)
@given(FINITE)
def test_any_finite_value_is_formatted_to_fifteen_digits(value):
    text = format_number(value)
    (number,) = scan(text)
    assert number.text == text
    assert math.isclose(number.value, value, rel_tol=6e-15, abs_tol=0.0)
    assert format_number(number.value) == text
    assert format_number(-value) == (text[1:] if text[0] == "-" else f"-{text}")


WORDS = st.text(st.sampled_from("abcXYZ价格元 ()!?"), min_size=1).map(lambda word: f" {word} ")


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(st.tuples(FINITE, WORDS), max_size=6))
def test_numbers_between_words_are_read_back(first, rest):
    values = [float(format_number(value)) for value, _ in rest]
    gaps = [first, *(word for _, word in rest)]
    assert parts(write(gaps, values)) == (gaps, values)


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e300, 1e300), st.floats(1e-13, 1e3), st.booleans())
def test_rounding_stays_within_half_the_spread(value, relative, absolute):
    spread = relative if absolute else abs(value) * relative
    if spread == 0.0 or spread < abs(value) * 1e-13:
        return
    text = format_number(value, spread)
    assert abs(Decimal(text) - Decimal(repr(value))) <= Decimal(repr(spread)) * Decimal("0.5000001")
    # No digit below the leading digit of the spread is written.
    exponent = Decimal(text).normalize().as_tuple().exponent
    assert text in {"0", "-0"} or (isinstance(exponent, int) and exponent >= Decimal(repr(spread)).adjusted())


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [
        (0.0, None, "0"),
        (-0.0, None, "-0"),
        (5.0, None, "5"),
        (-3.5, None, "-3.5"),
        (99.9, None, "99.9"),
        (0.0001, None, "0.0001"),
        (0.00001, None, "1e-5"),
        (0.00012345, None, "0.00012345"),
        (-0.000012345, None, "-1.2345e-5"),
        (1e6, None, "1000000"),
        (1234567.89, None, "1234567.89"),
        (123456789012345.0, None, "123456789012345"),
        (1e14, None, "100000000000000"),
        (1e15, None, "1e15"),
        (1e22, None, "1e22"),
        (6.02e23, None, "6.02e23"),
        (5e-324, None, "5e-324"),
        (0.1 + 0.2, None, "0.3"),  # 0.30000000000000004 has 17 digits
        (1 / 3, None, "0.333333333333333"),
        (2 / 3, None, "0.666666666666667"),
        (0.9999999999999999, None, "1"),
        (999999999999999.9, None, "1e15"),
        (1.7976931348623157e308, None, "1.79769313486231e308"),  # rounding up would be infinity
        (7, None, "7"),
        (99.8734, 0.3, "99.9"),
        (99.8734, 0.97, "99.9"),
        (99.8734, 1, "100"),
        (99.8734, 0, "99.8734"),
        (99.8734, 1e-9, "99.8734"),
        (99.8734, 1e-320, "99.8734"),
        (99.96, 0.3, "100"),
        (1234567.0, 2e5, "1200000"),
        (1.234567e18, 2e16, "1.23e18"),
        (6.0221e-23, 1e-25, "6.02e-23"),
        (-42.42, 0.1, "-42.4"),
        (3.0, 1e5, "0"),
        (-0.0004, 0.3, "0"),
        (-0.0, 0.3, "-0"),
        (0.0, 0.3, "0"),
        (0.3, 5e-324, "0.3"),
        (1.7e308, 1e308, "1.7e308"),
    ],
)
def test_format(value, spread, expected):
    assert format_number(value, spread) == expected


def test_format_does_not_depend_on_the_decimal_context():
    with decimal.localcontext() as context:
        context.prec = 3
        assert format_number(1234567.89) == "1234567.89"
        assert format_number(1234567.89, 0.5) == "1234567.9"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=rf"cannot write {value!r} .* clip it or drop it"):
        format_number(value)
    with pytest.raises(ValueError, match=rf"value 1: cannot write {value!r}"):
        write(["a", "b", "c"], [1.0, value])
    with pytest.raises(ValueError, match=rf"spread is {value!r}"):
        format_number(1.0, value)


def test_a_negative_spread_is_refused():
    with pytest.raises(ValueError, match=r"spread is -0\.1, but must be finite and not negative"):
        format_number(1.0, -0.1)


@pytest.mark.parametrize(
    ("gaps", "values", "expected"),
    [
        ([""], [], ""),
        (["价格是", "元"], [99.9], "价格是99.9元"),
        (["", ",", ""], [1.0, 200.0], "1.0,200"),  # "1,200" would be one number
        (["", ",", ",", ""], [-1.0, 200.0, 300.5], "-1.0,200,300.5"),
        (["", ",", ",", ""], [1.0, 200.0, 3.0], "1,200,3"),
        (["", ",", ""], [0.0, 200.0], "0,200"),
        (["", ",002"], [1.0], "1.0,002"),
        (["x ", "-", ",", ""], [5.0, 1.0, 200.0], "x 5-1.0,200"),
    ],
)
def test_write(gaps, values, expected):
    assert write(gaps, values) == expected
    assert parts(expected) == (gaps, values)


def test_write_rounds_by_the_spreads_and_checks_lengths():
    assert write(["about ", " to ", ""], [99.8734, 120.0], [0.3, None]) == "about 99.9 to 120"
    with pytest.raises(ValueError, match="1 values need 2 gaps and 1 spreads, but there are 1 and 1"):
        write(["a"], [1.0])
    with pytest.raises(ValueError, match="but there are 2 and 0"):
        write(["a", "b"], [1.0], [])


@pytest.mark.parametrize("ending", ["", ".x"])
@pytest.mark.parametrize(
    "unit",
    [
        "7",
        "0",
        "\uff17",
        "-",
        "\u2212",
        ",",
        ".",
        "a",
        "中-",
        "1e",
        "1-",
        "1.",
        "1:",
        "a1",
        "1-a",
        "1-aa-",
        "a1,111-",
    ],
)
def test_a_megabyte_without_numbers_is_linear_work(unit, ending):
    """A scan that does quadratic work needs 10^12 steps for these and does not come back."""
    assert len(scan(unit * (10**6 // len(unit)) + ending)) <= 1


@pytest.mark.parametrize(
    ("unit", "count"),
    [("1,", 1), ("111,", 1), ("1,11,", 2), ("5.-", 1), ("中-5", 1), ("3D-1,111,", 1), ("1e+1e,", 0)],
)
def test_a_list_of_many_numbers_is_linear_work(unit, count):
    repeats = 100_000 // len(unit)
    assert len(scan(unit * repeats + "11")) in {count * repeats, count * repeats + 1}


@pytest.mark.parametrize("unit", ["1-1,111,", "A-1,200,", "1/1,111,111-", "a-1,111,1,", "3D-1,111,"])
@pytest.mark.parametrize("repeats", [100, 1000])
def test_no_character_is_scanned_more_than_twice(unit, repeats, monkeypatch):
    """A code ends at a comma, behind which the rest of it is scanned again: once, not once per comma."""
    scanned = []

    def counted(text, begin, stop):
        scanned.append(stop - begin)
        return _scan(text, begin, stop)

    monkeypatch.setattr(numbers, "_scan", counted)
    text = unit * repeats
    scan(text)
    assert sum(scanned) <= 2 * len(text)
