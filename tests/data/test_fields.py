"""Fields are typed: what is a number is learned as that number, bit for bit, and nothing vanishes."""

import csv
import json
import math
from decimal import Decimal

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from causal_qwen.data import BadRow, BadRows, Collator, Encoder, Reading
from causal_qwen.data.fields import field, number_in, shortest
from conftest import tiny_processor

FINITE = st.floats(allow_nan=False, allow_infinity=False)
READING = Reading("{name} at {size:.3f} costs {price} coins", "price")
PROCESSOR = tiny_processor()


def write(directory, kind, rows):
    file = directory / f"rows.{kind}"
    if kind == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def bits(values):
    return torch.as_tensor(values, dtype=torch.float64).view(torch.int64).tolist()


@settings(max_examples=40, deadline=None)
@given(prices=st.lists(FINITE, min_size=1, max_size=5))
@example([2721.6018972544634, -0.0, 5e-324, 1.7976931348623157e308, 1e22, -123456789012345680.0])
def test_every_label_arrives_bit_for_bit(tmp_path_factory, prices):
    """Whatever the digits look like, and whatever file they come from."""
    directory = tmp_path_factory.mktemp("rows")
    rows = [{"name": "x", "size": price, "price": price} for price in prices]
    encoder = Encoder(PROCESSOR, READING, max_length=1000)
    for source in (rows, *(write(directory, kind, rows) for kind in ("csv", "jsonl", "parquet"))):
        batch = Collator.of(PROCESSOR)(list(encoder.rows(source, BadRows())))
        is_label = batch["labels"] == PROCESSOR.num_token_id
        assert bits(batch["numeric_values"][is_label]) == bits(prices)
        in_prompt = (batch["input_ids"] == PROCESSOR.num_token_id) & ~is_label
        assert bits(batch["numeric_values"][in_prompt]) == bits([float(f"{price:.3f}") for price in prices])


@given(number=FINITE | st.integers(-(10**30), 10**30))
def test_the_shortest_spelling_reads_back(number):
    spelled = shortest(number)
    assert bits([float(spelled)]) == bits([float(number)])
    assert len(spelled) <= len(repr(number))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("2721.6018972544634", 2721.6018972544634),
        (2721.6018972544634, 2721.6018972544634),
        ("12", 12),
        (" 1e5 ", 1e5),
        (".5", 0.5),
        ("-3", -3),
        (2**60, 2**60),
        (12345678901234567, 12345678901234567),  # a number by its type
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (Decimal("1.25"), 1.25),
        ("1152921504606846976", 2**60),  # nothing is lost
        ("12345678901234567", None),  # a code: float64 would change it
        ("007", None),
        ("+5", None),
        ("1,234", None),
        ("5kg", None),
        ("1970-01-01", None),
        ("1_000", None),
        ("0x10", None),
        (True, None),
        ([5], None),
    ],
)
def test_what_is_a_number(value, number):
    assert number_in(value, "x") == number
    if number is not None:
        assert number_in(value, "x", wanted=True) == number


@pytest.mark.parametrize(
    ("value", "number"),
    [("007", 7), ("+5", 5), ("1,234.5", 1234.5), ("−5", -5), ("12345678901234567", 12345678901234567)],
)
def test_where_a_number_is_wanted_more_is_read(value, number):
    assert number_in(value, "x", wanted=True) == number


@pytest.mark.parametrize("value", ["abc", "5kg", "$5", "3,14", "1.2.3", True, [5], {"a": 1}])
def test_a_target_that_is_no_number_is_named_with_its_remedy(value):
    good = {"name": "x", "size": 1, "price": 1}
    with pytest.raises(BadRow, match=r"row 1: price is .*, not a number; .*\{price!s\}"):
        list(READING.examples([good, good | {"price": value}], BadRows()))
    bad_rows = BadRows("skip")
    assert list(READING.examples([{"name": "x", "size": 1, "price": value}], bad_rows)) == []
    assert str(bad_rows).startswith("1 row skipped: price is ")
    words = Reading("{name} costs {price!s}", "price")
    (one,) = words.examples([{"name": "x", "price": value}], BadRows())
    assert (one.completion, one.completion_numbers) == (str(value), ())


@pytest.mark.parametrize("name", ["name", "price"])
@pytest.mark.parametrize(
    "value",
    ["nan", "NaN", "NA", "N/A", "null", "+inf", "-inf", "Infinity", "1e999", "-1e999", "", " ", None,
     math.nan, math.inf, 10**400, Decimal("NaN"), "9" * 400],
)  # fmt: skip
def test_what_is_missing_or_infinite_is_refused_in_every_field(value, name):
    row = {"name": "x", "size": 1, "price": 1} | {name: value}
    with pytest.raises(BadRow, match=rf"row 0: {name} is "):
        list(READING.examples([row], BadRows()))


def test_words_that_mean_missing_are_words_where_that_is_said():
    assert field({"country": "NA"}, "country", text=True) == "NA"
    (one,) = Reading("{country!s} {price}", "price").examples([{"country": "NA", "price": 1}], BadRows())
    assert one.prompt == "NA "


def test_text_around_a_field_is_read_alike_whatever_the_digits():
    """A range whose other end is a field, a code before one, a unit behind it."""
    reading = Reading("10-{x}kg of v{x}, {x} 5", None)
    for x in (2, 2721.6018972544634, -3, 1e-7):
        (row,) = Encoder(PROCESSOR, reading).rows([{"x": x}], BadRows())
        values = [
            v for t, v in zip(row.input_ids, row.numeric_values, strict=True) if t == PROCESSOR.num_token_id
        ]
        assert values == [10.0, x, x, x, 5.0]


def test_half_characters_are_bad_rows():
    rows = [{"text": "good"}, {"text": "bad \ud800"}]
    with pytest.raises(BadRow, match=r"row 1: the text has half a character \(U\+D800\) at position 4"):
        list(Encoder(PROCESSOR).rows(rows, BadRows()))
