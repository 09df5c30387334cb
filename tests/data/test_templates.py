"""A sentence with fields: what comes before the target, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.data import Template


def texts(passages):
    return tuple(passage.text for passage in passages)


def test_templates():
    template = Template("In {year:.4} {name!r} cost {price:.1f}, {{really}} {name}.", "price")
    row = {"year": "1970-01-01", "name": "fig", "price": 2}
    assert texts(template.render(row)) == ("In 1970 'fig' cost ", "2.0, {really} fig.")
    assert texts(Template("{a} is {b}").render({"a": 1, "b": 2})) == ("", "1 is 2")
    for text, target, message in (
        ("no field", None, "needs fields"),
        ("{a} {}", None, "by name"),
        ("{a", None, "cannot be read"),
        ("{a}", "b", "no field 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            Template(text, target)
    with pytest.raises(ValueError, match="cannot write"):
        Template("{a:.1f}").render({"a": "word"})


def test_prompts_end_before_the_target_and_do_not_need_it():
    row = {"a": 1, "bc": 2}
    assert Template("{a} {{b}} is {b:.2f}.", "b").prompt(row).text == "1 {b} is "
    assert Template("{a} {bc} {b!r} {b}", "b").prompt(row).text == "1 2 "
    assert Template("It is {b}.", "b").prompt({}).text == "It is "
    assert Template("{a} is {bc}").prompt(row).text == "1 is 2"
    with pytest.raises(ValueError, match="no field 'a'"):
        Template("{a} {b}", "b").prompt({"c": 3})


def test_a_template_that_begins_with_its_target_has_no_prompt():
    assert Template(" {b} is {a}", "b").begins_with_target
    assert not Template("{a} is {b}", "b").begins_with_target
    assert not Template("a: {b}", "b").begins_with_target
    assert not Template("{b}").begins_with_target


@given(st.lists(st.sampled_from(["{a}", "{b:.2f}", "{c!r}", "{{", "}}", " is ", "é"]), max_size=9))
def test_a_sentence_is_cut_but_not_changed(pieces):
    row = {"a": "x", "b": 2, "c": "y"}
    text = "".join([*pieces, "{c}"])
    for target in ("a", "b", "c", None):
        if target is None or f"{{{target}" in text.replace("{{", ""):
            template = Template(text.replace("{a}", "{a!s}").replace("{c}", "{c!s}"), target)
            before, after = texts(template.render(row))
            assert before + after == text.format(**row)
            assert template.prompt(row).text == (before if target else after)


@pytest.mark.parametrize(
    ("spec", "text", "target", "prompt"),
    [
        ("", "-1234.5678", -1234.5678, -1234.5678),
        (":.2f", "-1234.57", -1234.5678, -1234.57),
        (":,.1f", "-1,234.6", -1234.5678, -1234.6),
        (":=+12.1f", "-     1234.6", -1234.5678, -1234.6),
        (":012.1f", "-000001234.6", -1234.5678, -1234.6),
        (":.1%", "-123456.8%", -123456.78, -123456.8),
        (":.2e", "-1.23e+03", -1234.5678, -1230.0),
    ],
)
def test_a_target_keeps_its_value_and_a_prompt_shows_it(spec, text, target, prompt):
    before, after = Template(f"{{a{spec}}}: {{b{spec}}}", "b").render({"a": -1234.5678, "b": -1234.5678})
    assert texts((before, after)) == (f"{text}: ", text)
    for passage, value in ((before, prompt), (after, target)):
        (number,) = passage.numbers
        assert number.value == value
        assert passage.text[number.start : number.end] == number.text


def test_characters_of_a_csv_cell_can_be_taken():
    (year,) = [part for part in Template("{Year:.4} {b}").render({"Year": "19701231", "b": 1}) if part.text]
    assert year.text == "1970 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{x:>1001}", "at most 1000, not 1001"),
        ("{x:.99999f}", "at most 1000, not 99999"),
        ("{x:>" + "9" * 5000 + "}", "at most 1000"),
        ("{x:%9999d}", "at most 1000"),
        ("{x:{x}}", "no fields of its own"),
        ("{x!z}", "a conversion is !s, !r or !a"),
        ("{y} {x:x}", "decimal digits"),
    ],
)
def test_formats_are_bounded(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Template(text, "x")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["x.__class__", "x[0]", "x.real", "x.__class__.__mro__[1]"])
def test_fields_reach_neither_attributes_nor_items(name):
    with pytest.raises(ValueError, match="no field"):
        Template("{" + name + "}").render({"x": [1.5]})
    assert Template("{" + name + "}").render({name: "own"})[1].text == "own"
