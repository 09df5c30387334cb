"""A table of cases, the laws of `scan`, `format_number` and `write`, and inputs that hang a careless scan."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causal_qwen.numbers import MAX_DIGITS, UNITS, Number, format_number, scan, write

# Text and the numbers in it, as (what stands there, what it means).
CASES: list[tuple[str, list[tuple[str, float]]]] = [
    # Integers
    ("", []),
    ("no numbers here", []),
    ("没有数字", []),
    ("0", [("0", 0)]),
    ("7", [("7", 7)]),
    ("42 apples", [("42", 42)]),
    ("room 101, floor 3", [("101", 101), ("3", 3)]),
    ("(12)", [("12", 12)]),
    ("[1] and [2]", [("1", 1), ("2", 2)]),
    ("#5", [("5", 5)]),
    ('"7"', [("7", 7)]),
    ("*8*", [("8", 8)]),
    ("1)first", [("1", 1)]),
    ("9!", [("9", 9)]),
    ("5?6", [("5", 5), ("6", 6)]),
    ("1\x002", [("1", 1), ("2", 2)]),
    ("123456789012345", [("123456789012345", 123456789012345)]),
    ("100000000000000000000", [("100000000000000000000", 1e20)]),
    # Decimals
    ("5.0", [("5.0", 5)]),
    ("3.14159", [("3.14159", 3.14159)]),
    ("0.5", [("0.5", 0.5)]),
    ("0.0", [("0.0", 0)]),
    ("0.000", [("0.000", 0)]),
    (".5", [(".5", 0.5)]),
    ("odds of .05", [(".05", 0.05)]),
    ("(.25)", [(".25", 0.25)]),
    ("$.50", [(".50", 0.5)]),
    ("是.5吗", [(".5", 0.5)]),
    ("5.", [("5", 5)]),
    ("It was 5. Then 6.", [("5", 5), ("6", 6)]),
    ("Pi is 3.14.", [("3.14", 3.14)]),
    ("5...", [("5", 5)]),
    ("wait...5 minutes", [("5", 5)]),
    ("1..10", [("1", 1), ("10", 10)]),
    ("...1,234", [("1,234", 1234)]),
    (").5", []),
    (".5.0", []),
    ("5-.7", [("5", 5)]),
    ("a/.5", []),
    # Signs
    ("-3.5", [("-3.5", -3.5)]),
    ("-0", [("-0", -0.0)]),
    ("-.5", [("-.5", -0.5)]),
    ("(-2)", [("-2", -2)]),
    ("(\u22122)", [("\u22122", -2)]),
    ("\uff0d5", [("\uff0d5", -5)]),
    ("x = -1", [("-1", -1)]),
    ("x=-1", [("-1", -1)]),
    ("it is -5 today", [("-5", -5)]),
    ("f(-1, -2.5)", [("-1", -1), ("-2.5", -2.5)]),
    ("[3,-5]", [("3", 3), ("-5", -5)]),
    ("10^-5", [("10", 10), ("-5", -5)]),
    ("2*-3", [("2", 2), ("-3", -3)]),
    ("|-7|", [("-7", -7)]),
    ("'-7'", [("-7", -7)]),
    ("y:-3", [("-3", -3)]),
    ("$-5", [("-5", -5)]),
    ("-$5", [("5", 5)]),
    ("\u221210\u2013\u22125", [("\u221210", -10), ("\u22125", -5)]),
    ("3 - 5", [("3", 3), ("5", 5)]),
    ("3 - -5", [("3", 3), ("-5", -5)]),
    ("- 5 eggs", [("5", 5)]),
    ("3-5", [("3", 3), ("5", 5)]),
    ("3\u22125", [("3", 3), ("5", 5)]),
    ("-5-10", [("-5", -5), ("10", 10)]),
    ("5%-8%", [("5", 5), ("8", 8)]),
    ("5$-10$", [("5", 5), ("10", 10)]),
    ("(3)-5", [("3", 3), ("5", 5)]),
    ("--4", [("4", 4)]),
    ("done--5 left", [("5", 5)]),
    ("\u00b15", [("5", 5)]),
    ("+5", [("5", 5)]),
    ("+0.3%", [("0.3", 0.3)]),
    ("1+2", [("1", 1), ("2", 2)]),
    # Thousands groups and lists
    ("1,234", [("1,234", 1234)]),
    ("1,234,567.89", [("1,234,567.89", 1234567.89)]),
    ("-12,345.6", [("-12,345.6", -12345.6)]),
    ("$1,000,000", [("1,000,000", 1e6)]),
    ("1,234kg", [("1,234", 1234)]),
    ("900-1,200", [("900", 900), ("1,200", 1200)]),
    ("1,234,", [("1,234", 1234)]),
    ("1,2,3", [("1", 1), ("2", 2), ("3", 3)]),
    ("1, 234", [("1", 1), ("234", 234)]),
    ("1,23,456", [("1", 1), ("23", 23), ("456", 456)]),
    ("1,234,56", [("1", 1), ("234", 234), ("56", 56)]),
    ("1234,567", [("1234", 1234), ("567", 567)]),
    ("1,2345", [("1", 1), ("2345", 2345)]),
    ("0,123", [("0", 0), ("123", 123)]),
    ("3,14", [("3", 3), ("14", 14)]),
    ("1.5,200", [("1.5", 1.5), ("200", 200)]),
    ("1,234.5,6", [("1", 1), ("234.5", 234.5), ("6", 6)]),
    ("1\uff0c234", [("1", 1), ("234", 234)]),
    ("2026-11-15,100", [("100", 100)]),
    ("A-1,200", [("200", 200)]),
    ("3D-1,200", [("200", 200)]),
    ("1,234abc", []),
    ("1,234,567,890,123,456,789", []),
    # Scientific notation
    ("6.02e23", [("6.02e23", 6.02e23)]),
    ("1E-5", [("1E-5", 1e-5)]),
    ("1e-05", [("1e-05", 1e-5)]),
    ("5e+3", [("5e+3", 5000)]),
    ("-1.5E3", [("-1.5E3", -1500)]),
    ("1e\u22125", [("1e\u22125", 1e-5)]),
    (".5e2", [(".5e2", 50)]),
    ("1e5kg", [("1e5", 1e5)]),
    ("1e5-2e5", [("1e5", 1e5), ("2e5", 2e5)]),
    ("5e-324", [("5e-324", 5e-324)]),
    ("1.7976931348623e308", [("1.7976931348623e308", 1.7976931348623e308)]),
    ("6.02\u00d710^23", [("6.02", 6.02), ("10", 10), ("23", 23)]),
    ("1e", []),
    ("1e+", []),
    ("1e5e5", []),
    ("1e+5.0.1", []),
    ("6E+0.2e3", []),
    # Currency, percent, degrees and units stay outside
    ("$5", [("5", 5)]),
    ("\u20ac9.99", [("9.99", 9.99)]),
    ("\u00a5100", [("100", 100)]),
    ("100USD", [("100", 100)]),
    ("5%", [("5", 5)]),
    ("12.5\u2030", [("12.5", 12.5)]),
    ("20\u00b0C", [("20", 20)]),
    ("37\u2103", [("37", 37)]),
    ("5kg", [("5", 5)]),
    ("5 kg", [("5", 5)]),
    ("180cm tall", [("180", 180)]),
    ("16GB of RAM", [("16", 16)]),
    ("100ms.", [("100", 100)]),
    ("2.4GHz", [("2.4", 2.4)]),
    ("220V", [("220", 220)]),
    ("10k runs", [("10", 10)]),
    ("4K", [("4", 4)]),
    ("$1.5B", [("1.5", 1.5)]),
    ("2x faster", [("2", 2)]),
    ("50m\u00b2", [("50", 50)]),
    ("50m2", [("50", 50)]),
    ("3rd", [("3", 3)]),
    ("the 1980s", [("1980", 1980)]),
    ("9am", [("9", 9)]),
    ("60km/h", [("60", 60)]),
    ("9.8m/s\u00b2", [("9.8", 9.8)]),
    ("5/day", [("5", 5)]),
    ("10-20kg", [("10", 10), ("20", 20)]),
    ("5kg-10kg", [("5", 5), ("10", 10)]),
    ("5'10\"", [("5", 5), ("10", 10)]),
    ("5-year-old", [("5", 5)]),
    ("a 64-bit word", [("64", 64)]),
    ("a 5-10-year plan", [("5", 5), ("10", 10)]),
    # Ranges, fractions and scores: two numbers, three are a code
    ("1/2", [("1", 1), ("2", 2)]),
    ("-1/2", [("-1", -1), ("2", 2)]),
    ("24/7", [("24", 24), ("7", 7)]),
    ("1.5-2.5", [("1.5", 1.5), ("2.5", 2.5)]),
    ("2010\u20132015", [("2010", 2010), ("2015", 2015)]),
    ("10~20", [("10", 10), ("20", 20)]),
    ("1-2-3", []),
    ("1/2/3", []),
    ("1/2-3", []),
    # Identifiers and codes
    ("007", []),
    ("-007", []),
    ("00.5", []),
    ("00", []),
    ("007-5", []),
    ("05/11", []),
    ("A4", []),
    ("A4 paper, 2 sheets", [("2", 2)]),
    ("A-4", []),
    ("A\u20114", []),
    ("x86", []),
    ("H2O", []),
    ("CO2", []),
    ("3D", []),
    ("3-D", []),
    ("3-d", []),
    ("3-5D", []),
    ("5@6", []),
    ("3D-5", []),
    ("5G", []),
    ("10\u00b2", []),
    ("5\u00bd", []),
    ("5\ufe0f\u20e3", []),
    ("5\u20e3", []),
    ("5\u0302", []),
    ("\U0001d7d75", []),
    ("var_1", []),
    ("1_000", []),
    ("0x1F", []),
    ("0b101", []),
    ("#1f3a5c", []),
    ("sha 9fceb02d0ae598e95dc970b74767f19372d61af8", []),
    ("550e8400-e29b-41d4-a716-446655440000", []),
    ("00:1A:2B:3C:4D:5E", []),
    ("2001:db8:85a3:8d3:1319:8a2e:370:7348", []),
    ("v3.11.7", []),
    ("3.11.7", []),
    ("1.0.0-rc.1", []),
    ("5.x", []),
    ("10.0.0.1", []),
    ("10.0.0.1:8080", []),
    ("192.168.1.0/24", []),
    ("12:30", []),
    ("12:30:59.5", []),
    ("10:00-11:00", []),
    ("16:9", []),
    ("2026-11-15", []),
    ("2026-11-15T12:30:00Z", []),
    ("12/25/2024", []),
    ("+86-010-1234-5678", []),
    ("1-800-555-0199", []),
    ("ISBN 978-3-16-148410-0", []),
    ("ABC-123-DEF", []),
    ("COVID-19", []),
    ("GPT-4o", []),
    ("Fig.5", []),
    ("file1.txt", []),
    ("img/5.png", []),
    ("user5@mail.com", []),
    ("user@5", []),
    ("2-in-1", []),
    ("1920x1080", []),
    ("\u0410\u04174", []),  # Cyrillic letters are letters
    # Digits that float64 would lose
    ("1234567890123456", []),
    ("3.141592653589793", []),
    ("0.1000000000000000", []),
    ("0.000000000000000000012", [("0.000000000000000000012", 1.2e-20)]),
    ("1e999", []),
    ("-1e999", []),
    ("1e-999", []),
    ("1.8e308", []),
    ("0e999", [("0e999", 0)]),
    # Keys, JSON, markup
    ("price:5", [("5", 5)]),
    ('{"a":5,"b":-6.5}', [("5", 5), ("-6.5", -6.5)]),
    ("<td>-5</td><td>6</td>", [("-5", -5), ("6", 6)]),
    ("n=30, p<0.05", [("30", 30), ("0.05", 0.05)]),
    ("| 1 | 2.5 |", [("1", 1), ("2.5", 2.5)]),
    ("1\t2\n3\r\n-4", [("1", 1), ("2", 2), ("3", 3), ("-4", -4)]),
    # Full width
    ("\uff11\uff12\uff13", [("\uff11\uff12\uff13", 123)]),
    ("\uff13\uff0e\uff15", [("\uff13\uff0e\uff15", 3.5)]),
    ("\uff0d\uff15\u5ea6", [("\uff0d\uff15", -5)]),
    ("\uff11,\uff12\uff13\uff14", [("\uff11,\uff12\uff13\uff14", 1234)]),
    ("\uff13\uff0d\uff15", [("\uff13", 3), ("\uff15", 5)]),
    ("\uff11\uff12\uff1a\uff13\uff10", []),
    ("\uff10\uff10\uff17", []),
    ("\uff21\uff14", []),
    # Chinese, Japanese, Korean and mixed text
    ("价格是99.9元", [("99.9", 99.9)]),
    ("2024年", [("2024", 2024)]),
    ("第3章", [("3", 3)]),
    ("第007号", []),
    ("2024年1月5日", [("2024", 2024), ("1", 1), ("5", 5)]),
    ("共3.5万人", [("3.5", 3.5)]),
    ("增长5%。", [("5", 5)]),
    ("1、2、3", [("1", 1), ("2", 2), ("3", 3)]),
    ("约1,200元", [("1,200", 1200)]),
    ("气温-5℃", [("-5", -5)]),
    ("气温是-3.5度", [("-3.5", -3.5)]),
    ("同比-5.2%", [("-5.2", -5.2)]),
    ("1月气温-5℃", [("1", 1), ("-5", -5)]),
    ("3月-5月", [("3", 3), ("5", 5)]),
    ("12月3日-1月5日", [("12", 12), ("3", 3), ("1", 1), ("5", 5)]),
    ("10公里-20公里", [("10", 10), ("20", 20)]),
    ("5℃-10℃", [("5", 5), ("10", 10)]),
    ("10\uff5e20天", [("10", 10), ("20", 20)]),
    ("零下5度", [("5", 5)]),
    ("3D打印", []),
    ("5G网络覆盖90%", [("90", 90)]),
    ("iPhone15发布", []),
    ("Windows 11系统", [("11", 11)]),
    ("买了2台iPad和3个U盘", [("2", 2), ("3", 3)]),
    ("重5kg的包", [("5", 5)]),
    ("时间12:30", []),
    ("电话010-12345678", []),
    ("全長5.5メートル", [("5.5", 5.5)]),
    ("사과 3개", [("3", 3)]),
    ("عدد 5 كتب", [("5", 5)]),
    ("ราคา20บาท", [("20", 20)]),
    ("\ud8005\udc00", [("5", 5)]),
    ("👍5👍", [("5", 5)]),
]


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
