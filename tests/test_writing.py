"""A text that grows: whatever is handed out on the way is what `write` makes of the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.numbers import scan, write
from causal_qwen.writing import Writer

GAPS = st.lists(st.sampled_from([*",.0127 -ea", "１", "，", ",200", "\n"]), max_size=4).map("".join)
VALUES = st.sampled_from([0.0, 1.0, 12.0, 200.0, -1.0, -300.0, 1.5, 1234.0, 1e-5])


def grown(gaps, values):
    writer = Writer()
    parts = list(map(writer.add, gaps[0]))
    for value, gap in zip(values, gaps[1:], strict=True):
        parts += [writer.add_number(value), *map(writer.add, gap)]
    return "".join([*parts, writer.end()])


@given(st.lists(st.tuples(VALUES, GAPS), max_size=5), GAPS)
def test_what_grows_is_what_is_written(pairs, first):
    values, gaps = [value for value, _ in pairs], [first, *(gap for _, gap in pairs)]
    assert grown(gaps, values) == write(gaps, values)


@pytest.mark.parametrize(
    ("gaps", "values", "text"),
    [
        (["", ",", ""], [1.0, 200.0], "1.0,200"),
        (["", ",200,", ""], [1.0, 300.0], "1.0,200,300"),
        (["", ",2000"], [1.0], "1,2000"),
        (["", ", ", ""], [1.0, 200.0], "1, 200"),
        (["", "", ""], [12.0, 13.0], "12 13"),
        (["a", "", "", "b"], [3.0, -5.0, 1.5], "a3 -5 1.5b"),
        (["4 130", "7", ""], [18.5, 2.0], "4 130 18.57 2"),  # digits of a prompt, and a number behind them
    ],
)
def test_numbers_stay_apart(gaps, values, text):
    assert grown(gaps, values) == write(gaps, values) == text


def test_two_numbers_are_read_again_as_two():
    assert [number.value for number in scan(write(["a ", "", "", " b"], [3.0, -5.0, 1.5]))] == [
        3.0,
        -5.0,
        1.5,
    ]


def test_only_what_is_open_waits():
    writer = Writer()
    assert writer.add_number(1.0) == "1"
    assert writer.add(",") == ""
    assert writer.add("2") == ""
    assert writer.add(" ") == ",2 "
    assert [writer.add_number(1.0), writer.add(",")] == ["1", ""]
    assert writer.add_number(200.0) == ""
    assert writer.add("!") == ".0,200!"
    assert writer.end() == ""
